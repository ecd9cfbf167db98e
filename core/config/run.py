"""The `run` section."""

from typing import Annotated

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START, fixed, in_a_branch
from millrace.core.config.parts.section import READS, Section
from millrace.core.config.parts.user_function import UserFunction

RUN_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"


class Run(Section):
    """The run's name and length."""

    name: Annotated[str, in_a_branch("it names the run's folder")] = Field(
        pattern=RUN_NAME,
        description="Name of the run, of its folder, its MLflow run and its Prefect flow runs. The same name resumes.",
    )
    seed: Annotated[int, fixed("the order of prompts follows from it")] = Field(
        0, ge=0, lt=2**31, description="Every random choice of the run is derived from this seed."
    )
    iterations: Annotated[int, ANY_START] = Field(1, ge=1, description="RL iterations in total.")
    progress_timeout_s: Annotated[float, ANY_START] = Field(
        1800,
        gt=0,
        description="A call to trainer ranks or to an engine's process without progress for this long ends them, and they are built again; so does a background writer of a checkpoint that writes no byte. A driver that waits for its own work has more time. Seconds.",
    )
    prepare: Annotated[UserFunction | None, ANY_START] = Field(
        None,
        description="Function called with the configuration before anything else, to make files that are missing.",
    )
    import_from: Annotated[list[str], ANY_START, READS] = Field(
        [],
        description="Folders that your functions are imported from, before the working directory and after installed packages; when not given, the folder of the YAML file.",
    )
    experiment: Annotated[str, in_a_branch("the MLflow run lies in it")] = Field(
        "millrace", min_length=1, description="MLflow experiment that the run belongs to."
    )
