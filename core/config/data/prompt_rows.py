"""Common fields of sources and held-out sets: their files, their columns, and how a row becomes a prompt."""

from typing import Annotated, Any

from pydantic import Field

from millrace.core.config.data.curriculum import Levels, Pools
from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.section import NAME, READS, Section
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.config.reward import AS_THE_REWARD, RewardFunction
from millrace.core.contracts.rows.messages import LossOn


class PromptRows(Section):
    """Rows with prompts, and the meaning of their columns."""

    name: str = Field("default", pattern=NAME, description="Its name in metrics and lineage.")
    path: str  # each subclass says which paths it accepts
    prompt_key: str = Field(
        "prompt",
        description="Column with the prompt: a string or a list of chat messages. Keys may be dotted: reward_model.ground_truth.",
    )
    label_key: str | None = Field(
        "label", description="Column with the reference answer, handed to the reward."
    )
    metadata_key: str | None = Field("metadata", description="Column with a mapping handed to the reward.")
    extra_keys: list[str] = Field(
        [],
        description="Further columns that the reward gets, in `metadata` under the names given here: [data_source, extra_info.index].",
    )
    chat: bool = Field(True, description="Apply the chat template; a string prompt becomes one user message.")
    system: str | None = Field(None, description="System message put before prompts that have none.")
    tools_key: str | None = Field(
        None,
        description="Column with a list of tools in OpenAI's form, or its JSON text, which the chat template shows the model.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables of the chat template: {enable_thinking: false}."
    )
    chat_template_kwargs_key: str | None = Field(
        None, description="Column with such variables of the row, which override the section's."
    )
    sampling_key: str | None = Field(
        None,
        description="Column with the row's own `max_new_tokens`, `stop` and `stop_token_ids`, a mapping or its JSON text, instead of the values of `rollout.sampling`. The shorter length counts.",
    )
    images_key: str | None = Field(
        None,
        description="Column with the row's pictures, one or a list: paths beside the data file, URLs, data URLs or bytes. Each takes the place of an `<image>` in the prompt. With it, messages may bring pictures as parts too. null: prompts are text.",
    )
    label_from_prompt: bool = Field(
        False,
        description="Take the assistant's message off the end of a prompt as the reference answer, instead of `label_key`.",
    )
    loss_on: LossOn = Field(
        "answer",
        description="Supervised training: which part has a loss. answer: the label. Otherwise `prompt_key` names whole dialogues; assistant: each message of the assistant; last_assistant: the last one. A message's `weight` (0, 1) or `train` (false, true) overrides this.",
    )
    reward: Annotated[RewardFunction | None, AS_THE_REWARD] = Field(
        None, description="Reward of its samples; null: the section `reward`."
    )


class Source(PromptRows):
    """One set of prompts."""

    path: Annotated[str, ANY_START, READS] = Field(
        "",
        description="JSONL or Parquet file, a folder of them, a pattern (data/*.jsonl) or a folder of `save_to_disk`; path or fsspec URL. `@[first:last]` after it takes a slice of the rows. Or leave it out, and name a function in `rows`.",
    )
    rows: UserFunction | None = Field(
        None,
        description="Instead of a path: a function (millrace.DataSource) that returns the rows, as a list or anything else with a length and numbered items. Called in a separate process.",
    )
    levels: Levels | None = Field(
        None,
        description="Levels of difficulty that follow the policy: `rows` is called with each `level`. null: one level.",
    )
    pools: Pools | None = Field(
        None,
        description="Solved and unsolved rows come less often, from the source's second pass on. null: each row once a pass.",
    )
    weight: float = Field(
        1.0, gt=0, description="Share of the prompts drawn from this source, relative to the others."
    )
