"""The `data` section."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from millrace.core.config.parts.paths import READS
from millrace.core.config.parts.restart import ANY_START, fixed
from millrace.core.config.parts.section import Section
from millrace.core.config.reward import AS_THE_REWARD, RewardFunction

EPOCHS = "the order of prompts follows from it"


class Source(Section):
    """One set of prompts."""

    name: str = Field(
        "default", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the source in metrics and lineage."
    )
    path: Annotated[str, ANY_START, READS] = Field(
        description="JSONL or Parquet file, a folder of them, a pattern (data/*.jsonl) or a folder of `save_to_disk`; path or fsspec URL. `@[first:last]` after it takes a slice of the rows."
    )
    weight: float = Field(
        1.0, gt=0, description="Share of the prompts drawn from this source, relative to the others."
    )
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
        None, description="Column with such variables of the row, which come before those of the source."
    )
    label_from_prompt: bool = Field(
        False,
        description="The assistant's message at the end of a prompt is taken off it and is the reference answer, in place of `label_key`.",
    )
    reward: Annotated[RewardFunction | None, AS_THE_REWARD] = Field(
        None, description="Reward of this source's samples; null: that of the section `reward`."
    )


class Data(Section):
    """Which prompts are trained on, and in which order."""

    sources: Annotated[list[Source], fixed(EPOCHS)] = Field(min_length=1, description="Sources of prompts.")
    shuffle: Annotated[bool, fixed(EPOCHS)] = Field(
        True, description="Shuffle each epoch by the run's seed and the epoch."
    )
    max_prompt_tokens: Annotated[int, fixed(EPOCHS)] = Field(
        1024, ge=1, description="Longer prompts are quarantined. Tokens."
    )
    max_quarantined_share: Annotated[float, ANY_START] = Field(
        0.5,
        ge=0,
        le=1,
        description="Stop before training if more than this share of a source's rows is unusable.",
    )
    allow_changes: Annotated[bool, ANY_START] = Field(
        False,
        description="Continue a run although its data changed: from the first open iteration on, epochs restart with the data as it is now.",
    )
