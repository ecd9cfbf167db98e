"""Prompts drawn by how well the policy does: levels of difficulty, pools of solved and unsolved rows, stages."""

from __future__ import annotations

from pydantic import Field, model_validator

from millrace.core.config.parts.section import Section


class Levels(Section):
    """A source whose rows have a level of difficulty that follows the policy (RLVE, arXiv:2511.07317).

    Prompts come from the highest level reached and the levels below it. The highest rises by one when the policy does well
    there.
    """

    first: int = Field(0, ge=0, description="First level.")
    last: int = Field(4, ge=0, description="Last level.")
    window: int = Field(
        4, ge=1, description="Levels that prompts come from at once: the highest reached and those below it."
    )
    raise_from: float = Field(
        0.9, description="The highest level rises when the mean reward on it is at least this."
    )
    groups: int = Field(
        8,
        ge=1,
        description="Prompts of the highest level in this mean, counted since the level rose.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Levels:
        if self.last < self.first:
            raise ValueError(
                f"last = {self.last} is below first = {self.first}: set it to {self.first} or more"
            )
        return self


class Pools(Section):
    """Rows that are solved, or hopeless, come less often: from a source's second pass on, by their last mean reward."""

    solved_from: float = Field(1.0, description="Rows with at least this mean reward are solved.")
    unsolved_to: float = Field(0.0, description="Rows with at most this mean reward are unsolved.")
    solved_share: float = Field(0.1, gt=0, le=1, description="Share of the solved rows that a pass takes.")
    unsolved_share: float = Field(
        0.5, gt=0, le=1, description="Share of the unsolved rows that a pass takes."
    )

    @model_validator(mode="after")
    def _in_order(self) -> Pools:
        if self.solved_from <= self.unsolved_to:
            raise ValueError(
                f"solved_from = {self.solved_from:g} is not above unsolved_to = {self.unsolved_to:g}: raise it"
            )
        return self


class CurriculumStage(Section):
    """A stage of a curriculum: the sources' weights, and when it ends. The last stage does not end."""

    weights: dict[str, float] = Field(
        min_length=1,
        description="Share of the prompts by source, relative to each other; sources that are not named give none.",
    )
    iterations: int | None = Field(None, ge=1, description="The stage ends after so many iterations.")
    reward: float | None = Field(
        None, description="The stage ends when the mean reward of its last `groups` prompts is at least this."
    )
    groups: int = Field(64, ge=1, description="Prompts in this mean.")
