"""What a configuration comes to: numbers of an iteration and of the run, layout, memory and disk.

Owns the arithmetic; estimates are upper bounds of what millrace itself allocates, and say what they leave out. Reads the
model's config.json and nothing else. No torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from millrace.core.architecture import Architecture, architecture, read_hf_config
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.retention import checkpoints_to_drop, due

FP32 = 4
LOGIT_COPIES = 3  # logits, their softmax and the gradient of a chunk
SAMPLE_BYTES_A_TOKEN = 16  # of rollouts, batch and rewards together, compressed


@dataclass(frozen=True)
class Part:
    """A part of the memory of one rank or engine. Bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Numbers:
    """What one iteration does, and how many there are."""

    iterations: int
    prompts: int
    spare_prompts: int
    samples_per_prompt: int
    samples: int
    global_batch: int
    steps: int
    weight_versions: int
    prompt_tokens: int
    response_tokens: int
    pack_tokens: int
    samples_a_pack: int  # of the longest
    evaluations: int
    evaluated_samples: str
    checkpoints: list[int] = field(default_factory=list)
    checkpoints_kept: list[int] = field(default_factory=list)
    exports: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Layout:
    """Where trainer and engines run."""

    device: str
    world_size: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    sequence: bool
    engine_kind: str
    engines: int
    prefill: int
    gpus_an_engine: int
    gpus: int
    placement: str
    sync: str


@dataclass(frozen=True)
class Plan:
    """The whole; memory and disk are empty where the model is not there yet."""

    run: str
    numbers: Numbers
    layout: Layout
    parameters: int | None
    trainer_memory: list[Part]
    engine_memory: list[Part]
    disk: list[Part]
    files: list[str]


def make_plan(config: RunConfig, gpus: int | None = None) -> Plan:
    """The plan of a configuration that was checked. gpus: those of this host; looked up when not given."""
    layout = _layout(config, visible_gpus() if gpus is None else gpus)
    numbers = _numbers(config)
    try:
        shape = architecture(read_hf_config(config.model.path))
    except ConfigError:  # run.prepare makes it
        shape = None
    root = f"{config.storage.root.rstrip('/')}/{config.run.name}"
    return Plan(
        run=config.run.name,
        numbers=numbers,
        layout=layout,
        parameters=shape.parameters if shape else None,
        trainer_memory=trainer_memory(config, shape) if shape else [],
        engine_memory=engine_memory(config, shape, layout)
        if shape and not config.algorithm.supervised
        else [],
        disk=_disk(config, shape, numbers) if shape else [],
        files=_files(config, root),
    )


def visible_gpus() -> int:
    """GPUs this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _numbers(config: RunConfig) -> Numbers:
    iterations, c = config.run.iterations, config.checkpoint
    done = range(1, iterations + 1)
    saved = [number for number in done if due(number, c.every) or number == iterations]
    dropped = checkpoints_to_drop(saved, c.keep_last, c.keep_every)
    exports = [
        number
        for number in done
        if (c.export_every and due(number, c.export_every)) or (number == iterations and c.export_last)
    ]
    evaluated = [number for number in done if due(number, config.evaluation.every) or number == iterations]
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    return Numbers(
        iterations=iterations,
        prompts=config.rollout.prompts,
        spare_prompts=0
        if config.algorithm.supervised
        else round(config.filter.refill_factor * config.rollout.prompts),
        samples_per_prompt=config.rollout.samples_per_prompt,
        samples=config.samples_per_iteration,
        global_batch=config.global_batch,
        steps=config.steps_per_iteration,
        weight_versions=iterations * config.steps_per_iteration,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.rollout.sampling.max_new_tokens,
        pack_tokens=config.trainer.max_pack_tokens * config.trainer.parallel.context,
        samples_a_pack=config.trainer.max_pack_tokens * config.trainer.parallel.context // longest,
        evaluations=1 + len(evaluated) if config.evaluation.sets else 0,
        evaluated_samples=", ".join(f"{e.name} × {e.samples_per_prompt}" for e in config.evaluation.sets),
        checkpoints=saved,
        checkpoints_kept=[number for number in saved if number not in dropped],
        exports=exports,
    )


def _layout(config: RunConfig, gpus: int) -> Layout:
    p, e = config.trainer.parallel, config.engines
    cuda = config.trainer.device == "cuda" or (config.trainer.device == "auto" and gpus > 0)
    kind = e.kind if e.kind != "auto" else ("sglang" if gpus else "embedded")
    count = 0 if config.algorithm.supervised else e.count
    on_gpus = e.gpus if kind == "sglang" else 0
    return Layout(
        device="cuda" if cuda else "cpu",
        world_size=config.trainer.world_size,
        tensor=p.tensor,
        pipeline=p.pipeline,
        context=p.context,
        expert=p.expert,
        data=config.data_parallel,
        sequence=p.sequence,
        engine_kind=kind,
        engines=count,
        prefill=e.prefill,
        gpus_an_engine=on_gpus,
        gpus=count * on_gpus + (config.trainer.world_size if cuda and not config.placement.colocate else 0),
        placement=config.placement.ray_address or "a Ray head on this host",
        sync=config.sync_kind,
    )


# memory


def parameters_of_rank(config: RunConfig, shape: Architecture) -> int:
    """Parameters that the fullest rank holds: an outer pipeline stage's."""
    p = config.trainer.parallel
    expert_split = p.expert if p.expert > 1 else p.tensor
    router = shape.experts * shape.hidden
    mlp = shape.mlp * max(1, shape.experts) // (expert_split if shape.experts else p.tensor)
    layer = shape.attention // p.tensor + mlp + router + 2 * shape.hidden
    ends = 1 if p.pipeline > 1 or shape.tied else 2
    return -(-shape.layers // p.pipeline) * layer + ends * -(-shape.embedding // p.tensor) + shape.hidden


def trainer_memory(config: RunConfig, shape: Architecture) -> list[Part]:
    """Memory of the fullest rank, by part."""
    t = config.trainer
    held = parameters_of_rank(config, shape)
    width = 2 if config.model.dtype == "bfloat16" else 4
    trained = held * (2 if config.algorithm.critic is not None else 1)
    shards = config.data_parallel * t.parallel.context if t.optimizer.distributed else 1
    states = 2 * FP32 + (FP32 if width == 2 else 0)
    parts = [
        Part(f"weights, {config.model.dtype}", trained * width),
        Part("gradients, fp32", trained * FP32),
        Part(f"optimizer, fp32, 1/{shards}", -(-trained * states // shards)),
        Part("activations of a pack (estimate)", _activations(config, shape, width)),
        Part(
            f"logits of {t.logprob_chunk_tokens} tokens, fp32",
            LOGIT_COPIES * t.logprob_chunk_tokens * -(-shape.vocab // t.parallel.tensor) * FP32,
        ),
    ]
    if config.algorithm.kl_coef > 0:
        parts.append(Part("the policy, put aside for the reference", held * width))
    if config.algorithm.teacher:
        parts.append(Part("teacher", _teacher(config, width)))
    return parts


def _teacher(config: RunConfig, width: int) -> int:
    assert config.algorithm.teacher is not None
    try:
        teacher = architecture(read_hf_config(config.algorithm.teacher, "algorithm.teacher"))
    except ConfigError:
        return 0
    return parameters_of_rank(config, teacher) * width


def _activations(config: RunConfig, shape: Architecture, width: int) -> int:
    """What a layer keeps of each token for the backward pass, of every layer and pack that is on its way."""
    p, recompute = config.trainer.parallel, config.trainer.recompute
    layers, tokens = -(-shape.layers // p.pipeline), config.trainer.max_pack_tokens
    in_flight = p.pipeline  # packs that a first stage holds
    times, ffn = (shape.experts_used, shape.expert_ffn) if shape.experts else (1, shape.ffn)
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    streams = 4 * shape.hidden  # two residual sums and their norms
    inner = 2 * heads + shape.heads * shape.head_dim + 3 * times * ffn  # as projected and as attended; gated
    if shape.experts:
        inner += times * (ffn + 2 * shape.hidden)  # weighted; moved to the experts and back
    if recompute == "selective":
        streams -= 2 * shape.hidden
        inner -= times * ffn
    layer = tokens * width * ((streams // p.tensor if p.sequence else streams) + inner // p.tensor)
    if recompute == "full":
        return layers * in_flight * tokens * shape.hidden * width + layer
    return layers * in_flight * layer


def engine_memory(config: RunConfig, shape: Architecture, layout: Layout) -> list[Part]:
    """Memory of one engine on each of its devices, by part."""
    width = 2 if config.model.dtype == "bfloat16" else 4
    devices = max(1, layout.gpus_an_engine)
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    e = config.engines
    if e.kind in ("auto", "embedded") and layout.engine_kind == "embedded":
        tokens = min(e.max_total_tokens, e.max_running * longest)
    else:
        tokens = config.rollout.max_concurrency * longest
    waits = (
        ", all that may be in flight: what finds no room waits" if layout.engine_kind != "embedded" else ""
    )
    return [
        Part(f"weights, {config.model.dtype}", shape.parameters * width // devices),
        Part(
            f"KV cache of {tokens} tokens{waits}",
            tokens * shape.kv_bytes(width) // min(devices, shape.kv_heads),
        ),
    ]


# disk


def _disk(config: RunConfig, shape: Architecture, numbers: Numbers) -> list[Part]:
    width = 2 if config.model.dtype == "bfloat16" else 4
    trained = shape.parameters * (2 if config.algorithm.critic is not None else 1)
    checkpoint = trained * (width + 2 * FP32 + (FP32 if width == 2 else 0))
    tokens = numbers.samples * (numbers.prompt_tokens + numbers.response_tokens)
    kept = len(numbers.checkpoints_kept) + (
        1 if len(numbers.checkpoints) > len(numbers.checkpoints_kept) else 0
    )
    return [
        Part(f"{kept} checkpoints at most at once", kept * checkpoint),
        Part(f"{len(numbers.exports)} exports", len(numbers.exports) * shape.parameters * width),
        Part(
            f"samples of {numbers.iterations} iterations (at most)",
            numbers.iterations * tokens * SAMPLE_BYTES_A_TOKEN,
        ),
    ]


def _files(config: RunConfig, root: str) -> list[str]:
    parts = "prompts, batch, verdicts" + ("" if config.algorithm.supervised else ", rollouts/, rewards/")
    last = config.run.iterations
    files = [
        f"{root}/run.json",
        f"{root}/iterations/000000 .. {last - 1:06d}/ ({parts}, manifest.json)",
        f"{root}/checkpoints/NNNNNN/",
    ]
    if config.checkpoint.export_last or config.checkpoint.export_every:
        files.append(f"{root}/exports/NNNNNN/")
    if config.evaluation.sets:
        files.append(f"{root}/eval/SET/NNNNNN.parquet")
    return files
