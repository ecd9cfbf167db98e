"""Sections that describe the run, its storage, its model and its data. No torch, no I/O."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from millrace.core.config.base import Section


class Run(Section):
    """What the run is called and how long it goes on."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Name of the run; its folder, its MLflow run and its Prefect runs carry it. The same name resumes.",
    )
    seed: int = Field(
        0, ge=0, lt=2**31, description="Every random choice of the run is derived from this seed."
    )
    iterations: int = Field(1, ge=1, description="RL iterations in all.")
    prepare: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="Import path of a function that is called with the configuration before anything else, to make files that are missing.",
    )
    experiment: str = Field(
        "millrace", min_length=1, description="MLflow experiment that the run belongs to."
    )


class Storage(Section):
    """Where run folders live."""

    root: str = Field(
        "runs",
        min_length=1,
        description="Path or fsspec URL (file, s3, gs) under which each run has its folder. Credentials come from the environment.",
    )


class Model(Section):
    """The policy that is trained."""

    path: str = Field(description="Hugging Face checkpoint folder: config.json, safetensors, tokenizer.")
    tokenizer: str | None = Field(
        None, description="Folder of the tokenizer; the model's own when not given."
    )
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's own."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type of the parameters in the trainer's forward pass."
    )


class Source(Section):
    """One set of prompts."""

    name: str = Field(
        "default", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the source in metrics and lineage."
    )
    path: str = Field(description="JSONL or Parquet file, path or fsspec URL.")
    weight: float = Field(
        1.0, gt=0, description="Share of the prompts drawn from this source, relative to the others."
    )
    prompt_key: str = Field(
        "prompt", description="Column with the prompt: a string or a list of chat messages."
    )
    label_key: str | None = Field(
        "label", description="Column with the reference answer, handed to the reward."
    )
    metadata_key: str | None = Field(
        "metadata", description="Column with a mapping handed to the reward and to hooks."
    )
    chat: bool = Field(True, description="Apply the chat template; a string prompt becomes one user message.")
    system: str | None = Field(None, description="System message put before prompts that have none.")


class Data(Section):
    """Which prompts are trained on, and in which order."""

    sources: list[Source] = Field(min_length=1, description="Sources of prompts.")
    shuffle: bool = Field(True, description="Shuffle each epoch by the run's seed and the epoch.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are quarantined. Tokens.")
    max_quarantined_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Stop before training if more than this share of a source's rows is unusable.",
    )
    allow_changes: bool = Field(
        False,
        description="Go on with a run although its data changed: from the first open iteration on, epochs begin anew with the data as it is.",
    )


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
    samples_per_prompt: int = Field(8, ge=1, description="Samples of one prompt: the group size n.")
    sampling: Sampling = Sampling()
    max_concurrency: int = Field(64, ge=1, description="Samples in flight per engine.")
    part_groups: int = Field(16, ge=1, description="Finished groups gathered before a part is written.")
    progress_timeout_s: float = Field(
        600,
        gt=0,
        description="A request that yields no token for this long is given up and retried elsewhere. Seconds.",
    )
    attempts: int = Field(3, ge=1, description="Tries per sample before it counts as failed.")
    max_failed_share: float = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail before the run stops."
    )


class Reward(Section):
    """How samples are scored."""

    function: str = Field(
        "millrace.core.rewards.text:exact_match",
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="Import path package.module:function of the reward (see millrace.core.hooks.Reward).",
    )
    options: dict[str, Any] = Field({}, description="Keyword options handed to the reward function.")
    workers: int = Field(1, ge=1, description="Processes that score; each can be killed on its own.")
    timeout_s: float = Field(30, gt=0, description="Longest time for one sample. Seconds.")
    max_failed_share: float = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail scoring before the run stops."
    )


class Filter(Section):
    """Which groups are trained on."""

    drop_zero_variance: bool = Field(
        False, description="Drop groups whose rewards are all equal and draw others (dynamic sampling)."
    )
    function: str | None = Field(
        None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="Import path of a group filter (see millrace.core.hooks.GroupFilter), used besides the above.",
    )
    refill_factor: float = Field(
        2.0,
        ge=0,
        description="Extra prompts an iteration may draw in place of dropped ones, in multiples of rollout.prompts.",
    )
    when_insufficient: Literal["keep", "stop"] = Field(
        "keep",
        description="After the refill budget: keep the earliest zero-variance groups, or stop the run.",
    )
