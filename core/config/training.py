"""Sections that describe the trainer, the engines and what surrounds them. No torch, no I/O."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from millrace.core.config.base import Section
from millrace.core.config.model import Sampling


class Parallel(Section):
    """How the model is split over the trainer's ranks; data parallel size is what remains."""

    tensor: int = Field(1, ge=1, description="Tensor parallel size (tp).")
    pipeline: int = Field(1, ge=1, description="Pipeline parallel size (pp).")
    context: int = Field(1, ge=1, description="Context parallel size (cp).")
    expert: int = Field(1, ge=1, description="Expert parallel size (ep).")
    sequence: bool = Field(False, description="Sequence parallelism (sp) within tensor parallel groups.")


class Optimizer(Section):
    """AdamW and gradient clipping."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's decay rates.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(1.0, ge=0, description="Largest gradient norm; 0 does not clip.")
    distributed: bool = Field(True, description="Shard optimizer state over data parallel ranks.")


class Schedule(Section):
    """Learning rate over optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0.")
    decay_steps: int | None = Field(
        None, ge=1, description="Steps until min_lr; the run's steps when not given."
    )
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")


class Trainer(Section):
    """The Megatron trainer."""

    world_size: int = Field(
        1, ge=1, description="Ranks: one process each, one GPU each where there are GPUs."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto takes the GPU when there is one."
    )
    parallel: Parallel = Parallel()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    global_batch: int | None = Field(
        None, ge=1, description="Samples of one optimizer step; all samples of the iteration when not given."
    )
    max_pack_tokens: int = Field(8192, ge=1, description="Longest pack (one microbatch of one rank). Tokens.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="What the backward pass makes again instead of keeping it: selective the outputs of norms and "
        "activations (about a quarter of what a dense layer keeps, without a matrix product), full every layer from its input "
        "(a third more time).",
    )
    logprob_chunk_tokens: int = Field(
        1024,
        ge=1,
        description="Tokens whose logits are held at once, in fp32 on the CPU; on a GPU four times as many in the model's type, and more while there is room.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads a rank. When not given: 1 beside a GPU, else cores divided by ranks.",
    )
    deterministic: bool = Field(
        True, description="Deterministic kernels; repeated runs are equal bit for bit on CPU."
    )
    megatron: dict[str, Any] = Field(
        {}, description="Fields of megatron-core's TransformerConfig by their own names."
    )


class Router(Section):
    """An sglang-router process through which requests reach the engines, in place of the own dispatcher."""

    policy: Literal["random", "round_robin", "cache_aware", "power_of_two", "manual"] = Field(
        "cache_aware",
        description="Which engine gets a request. cache_aware: the one that has seen its beginning, until loads differ much; manual: that of the group's other samples.",
    )
    options: dict[str, Any] = Field({}, description="Fields of its RouterArgs by their own names.")


class Engines(Section):
    """The servers that generate."""

    kind: Literal["auto", "embedded", "sglang", "external"] = Field(
        "auto",
        description="auto takes sglang where there is a GPU, else the embedded engine; external: servers that run already.",
    )
    addresses: list[str] = Field(
        [],
        description="URLs of external engines, as in http://host:30000, one an engine. They must serve model.path, for this run alone.",
    )
    count: int = Field(1, ge=1, description="Engines.")
    prefill: int = Field(
        0,
        ge=0,
        description="How many of them only prefill, the first ones; the others then only decode (sglang). SGLang moves the KV cache between them.",
    )
    gpus: int = Field(1, ge=1, description="GPUs an engine (sglang).")
    host: str = Field(
        "127.0.0.1",
        description="Address the servers listen on. Loopback unless you change it; 0.0.0.0 for engines on other nodes.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads an embedded engine.")
    start_timeout_s: float = Field(
        600, gt=0, description="Longest wait for a server to become healthy. Seconds."
    )
    restarts: int = Field(3, ge=0, description="Times an engine may be restarted within the run.")
    max_running: int = Field(64, ge=1, description="Requests an embedded engine runs at once.")
    max_total_tokens: int = Field(65536, ge=1, description="Tokens of KV cache an embedded engine holds.")
    sglang: dict[str, Any] = Field({}, description="Fields of SGLang's ServerArgs by their own names.")
    router: Router | None = Field(
        None, description="Requests go through an sglang-router; when not given, to the least loaded engine."
    )

    @property
    def generating(self) -> int:
        """Engines that make tokens."""
        return self.count - self.prefill


class Placement(Section):
    """Where ranks and engines run."""

    colocate: bool = Field(
        False,
        description="Trainer and engines share GPUs and release memory in turn: engines their weights and KV cache while the trainer steps, the trainer its optimizer state and gradients while they take new weights and generate.",
    )
    offload_engines: bool = Field(
        True,
        description="On shared GPUs, whether engines release their memory while the trainer steps. Without it they keep engines.sglang.mem_fraction_static of the GPU, and the trainer has what is left.",
    )
    offload_trainer: bool = Field(
        True,
        description="On shared GPUs, whether the trainer's optimizer state goes to host memory while engines take new weights and generate. Where GPU memory suffices for both, keeping it there saves that way.",
    )
    ray_address: str | None = Field(
        None, description="Ray cluster to join; a local one is started when not given."
    )
    wait_s: float = Field(
        120,
        ge=0,
        description="Longest wait for the cluster to have room for the run, also after a node died. Seconds.",
    )


class Sync(Section):
    """How weights reach the engines."""

    kind: Literal["auto", "disk", "ipc", "broadcast"] = Field(
        "auto",
        description="disk: a Hugging Face folder; ipc: GPU memory handed over a bucket at a time, for sglang engines on the trainer's GPUs; broadcast: buckets sent from trainer rank 0 to engines elsewhere, by NCCL, or by gloo to embedded engines. auto takes ipc where GPUs are shared, broadcast for engines.kind=sglang elsewhere, else disk.",
    )
    directory: str | None = Field(
        None,
        description="Folder through which weights go, seen by trainer and engines under this path; or a URL such as s3://bucket/weights, to which the trainer's ranks copy them and from which each engine's node does, not for engines.kind=external; shared memory of this host when not given, which several nodes do not share.",
    )
    bucket_mib: int = Field(
        512,
        ge=1,
        description="Size of a bucket: the extra memory that ipc and broadcast take on every trainer rank, where no tensor is larger. MiB.",
    )
    verify: bool = Field(
        False,
        description="After each sync by ipc or broadcast also load the weights from disk and compare the engine's checksums of both; with disk alone there is nothing to compare with.",
    )
    max_logprob_gap: float = Field(
        0.02,
        gt=0,
        description="Largest mean difference of engine and trainer log-probabilities at each iteration's first step; above it the run stops.",
    )

    @property
    def by_url(self) -> bool:
        """Whether files are copied to and from sync.directory, instead of being read and written in place."""
        return "://" in (self.directory or "")


class Checkpoint(Section):
    """When trainer state is saved and what is kept."""

    every: int = Field(
        10, ge=1, description="Iterations between checkpoints; the last iteration is always saved."
    )
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept.")
    keep_every: int | None = Field(
        None, ge=1, description="Also keep each checkpoint whose iteration divides by this."
    )
    keep_best: str | None = Field(
        None,
        description="Also keep the checkpoint with the highest value of this metric, as in eval/held_out/reward_mean.",
    )
    export_every: int | None = Field(
        None, ge=1, description="Iterations between Hugging Face exports; only the last when not given."
    )
    export_last: bool = Field(True, description="Export a Hugging Face checkpoint after the last iteration.")


class EvalSet(Section):
    """One held-out set."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="Name of the set in metrics and files.")
    path: str = Field(description="JSONL or Parquet file, path or fsspec URL.")
    prompt_key: str = Field("prompt", description="Column with the prompt.")
    label_key: str | None = Field("label", description="Column with the reference answer.")
    metadata_key: str | None = Field("metadata", description="Column with a mapping for the reward.")
    chat: bool = Field(True, description="Apply the chat template.")
    system: str | None = Field(None, description="System message put before prompts that have none.")
    samples_per_prompt: int = Field(1, ge=1, description="Samples of one prompt.")
    sampling: Sampling = Sampling(temperature=0)


class Evaluation(Section):
    """Held-out accuracy during the run."""

    sets: list[EvalSet] = Field([], description="Sets that are evaluated.")
    every: int = Field(
        10, ge=1, description="Iterations between evaluations; also before the first and after the last."
    )


class Tracking(Section):
    """Where curves are kept."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; a SQLite file in MILLRACE_HOME when not given."
    )
    samples: int = Field(
        4, ge=0, description="Samples of each iteration shown in the Prefect artifact table."
    )
