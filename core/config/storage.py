"""The `storage` section."""

from pydantic import Field

from millrace.core.config.parts.section import Section


class Storage(Section):
    """Where run folders live."""

    root: str = Field(
        "runs",
        min_length=1,
        description="Path or fsspec URL (file, s3, gs) under which each run has its folder. Credentials come from the environment.",
    )
