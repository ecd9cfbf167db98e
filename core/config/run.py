"""The `run` section."""

from __future__ import annotations

from pydantic import Field

from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction


class Run(Section):
    """What the run is called and how long it is."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Name of the run, of its folder, its MLflow run and its Prefect flow runs. The same name resumes.",
    )
    seed: int = Field(
        0, ge=0, lt=2**31, description="Every random choice of the run is derived from this seed."
    )
    iterations: int = Field(1, ge=1, description="RL iterations in total.")
    prepare: UserFunction | None = Field(
        None,
        description="Function called with the configuration before anything else, to make files that are missing.",
    )
    experiment: str = Field(
        "millrace", min_length=1, description="MLflow experiment that the run belongs to."
    )
