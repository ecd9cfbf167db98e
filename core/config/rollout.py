"""The `rollout` section."""

from __future__ import annotations

from pydantic import Field

from millrace.core.config.parts.section import Section


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

    prompts: int = Field(32, ge=1, description="Prompts (groups) that one iteration trains on.")
    samples_per_prompt: int = Field(8, ge=1, description="Samples per prompt: the group size n.")
    sampling: Sampling = Sampling()
    max_concurrency: int = Field(64, ge=1, description="Samples in flight per engine.")
    part_groups: int = Field(16, ge=1, description="Finished groups gathered before a part is written.")
    progress_timeout_s: float = Field(
        600,
        gt=0,
        description="A request that yields no token for this long is aborted and retried on another engine. Seconds.",
    )
    attempts: int = Field(3, ge=1, description="Tries per sample before it counts as failed.")
    max_failed_share: float = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail before the run stops."
    )
