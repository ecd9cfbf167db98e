"""The `tracking` section."""

from __future__ import annotations

from pydantic import Field

from millrace.core.config.parts.section import Section


class Tracking(Section):
    """Where curves are kept."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; a SQLite file in MILLRACE_HOME when not given."
    )
    samples: int = Field(
        4, ge=0, description="Samples of each iteration shown in the Prefect artifact table."
    )
