"""The `evaluation` section."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from millrace.core.config.parts.paths import READS
from millrace.core.config.parts.section import NAME, Section
from millrace.core.config.reward import AS_THE_REWARD, RewardFunction
from millrace.core.config.rollout import Sampling
from millrace.core.contracts.rows.trained_messages import LossOn


class EvalSet(Section):
    """One held-out set."""

    name: str = Field(pattern=NAME, description="Name of the set in metrics and files.")
    path: Annotated[str, READS] = Field(description="Files of the set, as `data.sources[].path` takes them.")
    prompt_key: str = Field("prompt", description="Column with the prompt; dotted for a part of it.")
    label_key: str | None = Field("label", description="Column with the reference answer.")
    metadata_key: str | None = Field("metadata", description="Column with a mapping for the reward.")
    extra_keys: list[str] = Field([], description="Further columns, in `metadata` under these names.")
    chat: bool = Field(True, description="Apply the chat template.")
    system: str | None = Field(None, description="System message put before prompts that have none.")
    tools_key: str | None = Field(None, description="Column with tools in OpenAI's form.")
    chat_template_kwargs: dict[str, Any] = Field({}, description="Variables of the chat template.")
    chat_template_kwargs_key: str | None = Field(None, description="Column with such variables of the row.")
    sampling_key: str | None = Field(
        None, description="Column with the row's own length and stops, as `data.sources[].sampling_key`."
    )
    label_from_prompt: bool = Field(
        False, description="The assistant's message at the end of a prompt is the reference answer."
    )
    loss_on: LossOn = Field(
        "answer", description="Supervised training: what has a loss, as `data.sources[].loss_on` says it."
    )
    reward: Annotated[RewardFunction | None, AS_THE_REWARD] = Field(
        None, description="Reward of this set's samples; null: the section `reward`."
    )
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
