"""How samples are generated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START, fixed, in_a_branch
from millrace.core.config.parts.section import Section
from millrace.core.config.rollout.buffer import Buffer
from millrace.core.config.rollout.session import Session

STEPS = "the number of steps an iteration follows from it"


class Sampling(Section):
    """How responses are sampled; names and meanings as in SGLang."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy (evaluation only).")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, description="-1 keeps the whole vocabulary.")
    min_p: float = Field(0.0, ge=0, le=1, description="Smallest probability relative to the likeliest token.")
    max_new_tokens: int = Field(256, ge=1, description="Longest response. Tokens.")
    stop: list[str] = Field([], description="Strings that end a response.")
    stop_token_ids: list[int] = Field(
        [], description="Token ids that end a response, besides the end-of-sequence token."
    )


class Rollout(Section):
    """How samples are generated."""

    prompts: Annotated[int, fixed(STEPS)] = Field(
        32, ge=1, description="Prompts (groups) that one iteration trains on."
    )
    samples_per_prompt: Annotated[int, fixed(STEPS)] = Field(
        8, ge=1, description="Samples per prompt: the group size n."
    )
    sampling: Annotated[
        Sampling, in_a_branch("an open iteration may hold samples that were drawn with it")
    ] = Sampling()
    session: Annotated[
        Session | None, in_a_branch("an open iteration may hold turns that were made with it")
    ] = Field(None, description="Rollouts of several turns; null: one answer to each prompt.")
    buffer: Annotated[Buffer | None, in_a_branch("an open iteration may have drawn by it")] = Field(
        None, description="Off-policy reuse of trained groups; null: every group is trained once."
    )
    max_concurrency: Annotated[int, ANY_START] = Field(64, ge=1, description="Samples in flight per engine.")
    shards: Annotated[int | None, ANY_START] = Field(
        None,
        ge=1,
        description="Shards that generate and score an iteration, with placement.task_runner=ray; null: one for each node with "
        "engines.",
    )
    part_groups: Annotated[int, ANY_START] = Field(
        16, ge=1, description="Finished groups gathered before a part is written."
    )
    flush_tokens: Annotated[int | None, ANY_START] = Field(
        None,
        ge=16,
        description="Most tokens of an answer under way that are generated again after a kill: what there is of it is stored "
        "meanwhile, and it goes on from there. null: answers are stored whole. For answers of many thousand tokens; 2048, say.",
    )
    progress_timeout_s: Annotated[float, ANY_START] = Field(
        600,
        gt=0,
        description="A request that yields no token for this long is aborted and retried on another engine. Seconds.",
    )
    attempts: Annotated[int, ANY_START] = Field(
        3, ge=1, description="Tries per sample before it counts as failed."
    )
    max_failed_share: Annotated[float, ANY_START] = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail before the run stops."
    )

    @property
    def longest_response(self) -> int:
        """Most tokens after a prompt: of the answer, or of the whole dialogue."""
        return self.session.max_tokens if self.session else self.sampling.max_new_tokens

    @property
    def longest_response_field(self) -> str:
        """The field that sets it."""
        return "rollout.session.max_tokens" if self.session else "rollout.sampling.max_new_tokens"
