"""The `checkpoint` section."""

from typing import Annotated

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.section import Section


class Checkpoint(Section):
    """When trainer state is saved and what is kept."""

    every: int = Field(
        10, ge=1, description="Iterations between checkpoints; the last iteration is always saved."
    )
    background: Annotated[bool | None, ANY_START] = Field(
        None,
        description="Continue while a checkpoint is written: the trainer copies its state to host memory and one process a rank writes it. The checkpoint counts from the first iteration that finds it whole. At most one is written at a time. When not given: true on GPUs.",
    )
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep each checkpoint whose iteration divides by this."
    )
    keep_best: str | None = Field(
        None,
        description="Also keep the checkpoint with the highest value of this metric of an evaluation, as in eval/held_out/reward_mean. For a supervised run's eval/held_out/loss: the lowest.",
    )
    export_every: int | None = Field(
        None, ge=1, description="Iterations between Hugging Face exports; only the last when not given."
    )
    export_last: bool = Field(True, description="Export a Hugging Face checkpoint after the last iteration.")
