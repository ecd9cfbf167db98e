"""The `evaluation` section."""

from typing import Annotated

from pydantic import Field

from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.config.parts.section import NAME, READS, Section
from millrace.core.config.rollout import Sampling


class EvalSet(PromptRows):
    """One held-out set."""

    name: str = Field(pattern=NAME, description="Name of the set in metrics and files.")
    path: Annotated[str, READS] = Field(description="Files of the set, as `data.sources[].path` takes them.")
    samples_per_prompt: int = Field(
        1, ge=1, description="Samples per prompt. Two or more give pass@k and the majority's share."
    )
    correct_from: float = Field(
        1.0, description="Reward from which an answer counts as correct, in pass@k and the majority."
    )
    subset_key: str | None = Field(
        None, description="Key of `metadata` that names a row's subset: metrics are given by subset too."
    )
    sampling: Sampling = Field(
        Sampling(temperature=0),
        description="How its answers are sampled. Unless they are given, `temperature` is 0 (greedy), or 1 with several samples a prompt, and `max_new_tokens` is the rollout's.",
    )


class Evaluation(Section):
    """Held-out accuracy during the run; held-out loss in supervised training."""

    sets: list[EvalSet] = Field(
        [],
        description="Sets that are evaluated. An answer whose scoring fails counts as wrong; eval/SET/unscored counts them.",
    )
    every: int = Field(
        10, ge=1, description="Iterations between evaluations; also before the first and after the last."
    )
    background: bool | None = Field(
        None,
        description="Evaluate weights while the next iteration generates and trains, until engines get the weights after them. "
        "False: nothing else starts meanwhile. null: with pipeline.ahead > 0. The last iteration's evaluation is always waited for.",
    )
