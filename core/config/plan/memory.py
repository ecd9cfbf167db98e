"""Memory of a trainer rank and of an engine, by part; and the sizes and names of what a run writes.

Estimates are upper bounds of what millrace itself allocates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from millrace.core.config.megatron_options.stages import layers_of_ranks
from millrace.core.config.plan.layout import Layout
from millrace.core.config.plan.numbers import Numbers
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.families.adapters import parameters_of, targeted
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.family import ModelPart

FP32 = 4  # bytes
# parameters of FSDP's blocks that are gathered at once: each gathering takes the host some 3 ms a step, in which small blocks are
# long computed
GATHERED = 2**28
ON_THE_WAY = 2 * 2 * 2**26  # bytes of a rank: two chunks of gradients and of weights
LOGIT_COPIES = 3  # logits, their softmax and the gradient of a chunk


@dataclass(frozen=True)
class MemoryPart:
    """A part of the memory of one rank or engine. Bytes."""

    name: str
    size: int


def size_text(size: float) -> str:
    """Bytes as a person reads them, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def parameters_of_rank(config: RunConfig, shape: Architecture) -> int:
    """Parameters that the fullest rank holds."""
    return max(_held_by_ranks(config, shape))[0]


def _held_by_ranks(config: RunConfig, shape: Architecture) -> list[tuple[int, int]]:
    """Parameters that each rank of a pipeline holds, and how many of these are experts'."""
    p = config.trainer.parallel
    held, experts = [], []
    for layers in layers_of_ranks(config, shape.layers):
        parts = [
            (part, _share(config, part, size))
            for at in layers
            if at < shape.layers
            for part, size in shape.counted(at)
        ]
        held.append(sum(size for _, size in parts))
        experts.append(sum(size for part, size in parts if part.of_experts))
    # an output layer that is tied is on the last stage too
    held[0] += -(-shape.embedding // p.tensor)
    held[-1] += shape.hidden + (0 if shape.tied and p.pipeline == 1 else -(-shape.embedding // p.tensor))
    return list(zip(held, experts, strict=True))


def _share(config: RunConfig, part: ModelPart, size: int) -> int:
    """What a rank holds of a part with so many parameters."""
    p = config.trainer.parallel
    if part.of_experts:
        return -(-size // (p.expert * p.tensor_of_experts))
    return size if part.split is None else -(-size // p.tensor)


def trainer_memory(config: RunConfig, shape: Architecture) -> list[MemoryPart]:
    """Memory of the fullest rank, by part."""
    t = config.trainer
    if t.kind == "fsdp":
        return _fsdp_memory(config, shape)
    width = 2 if config.dtype == "bfloat16" else 4
    held, weights, trained, experts = _of_fullest_rank(config, shape)
    adapters, _ = _adapters_of_rank(config, shape)
    parts = [
        MemoryPart(f"weights, {config.dtype}", weights * width),
        MemoryPart("gradients, fp32", trained * FP32),
        *_optimizer(config, trained, experts),
        MemoryPart("activations of a pack (estimate)", _activations(config, shape, width)),
        MemoryPart(
            f"logits of {t.logprob_chunk_tokens} tokens, fp32",
            LOGIT_COPIES * t.logprob_chunk_tokens * -(-shape.vocab // t.parallel.tensor) * FP32,
        ),
    ]
    if config.algorithm.kl_coef > 0:
        parts.append(MemoryPart("the policy, put aside for the reference", (adapters or held) * width))
    if config.algorithm.teacher:
        parts.append(MemoryPart("teacher", _teacher(config, width)))
    return parts


def _optimizer(config: RunConfig, trained: int, experts: int) -> Iterator[MemoryPart]:
    """The optimizer state that a rank keeps beside so many parameters, without what trainer.optimizer.offload takes from it."""
    kept = 1 - config.trainer.optimizer.offload
    of_it = f", {kept:.0%} of it" if kept < 1 else ""
    shards, copies = _copies(config)
    for name, count, ranks in (
        ("optimizer", trained - experts, shards),
        ("optimizer of experts", experts, copies),
    ):
        size = ceil(kept * ceil(count * state_bytes(config) / ranks))
        if size:
            yield MemoryPart(f"{name}, fp32, 1/{ranks}{of_it}", size)


def _of_fullest_rank(config: RunConfig, shape: Architecture) -> tuple[int, int, int, int]:
    """Parameters of the policy without adapters, all weights, trained parameters, and how many of these are experts'."""
    held, experts = max(_held_by_ranks(config, shape))
    critic = critic_shape(config, shape)
    critics, critics_experts = max(_held_by_ranks(config, critic)) if critic else (0, 0)
    adapters, of_experts = _adapters_of_rank(config, shape)
    trained = (adapters or held) + critics
    return held, held + adapters + critics, trained, (of_experts if adapters else experts) + critics_experts


def _copies(config: RunConfig) -> tuple[int, int]:
    """The ranks that share the optimizer state of a parameter, and of an expert's."""
    t = config.trainer
    if t.kind == "fsdp":
        shards = t.world_size // t.parallel.replicate
        return shards, shards
    if not t.optimizer.distributed:
        return 1, 1
    # ranks with other experts share none of their states
    split = t.parallel.expert * t.parallel.tensor_of_experts * t.parallel.pipeline
    return config.data_parallel * t.parallel.context, t.world_size // split


def state_bytes(config: RunConfig) -> int:
    """Bytes of optimizer state to a parameter: two moments, and megatron-core's fp32 weight beside one in bfloat16."""
    beside = config.dtype == "bfloat16" and config.trainer.kind != "fsdp"
    return 2 * FP32 + (FP32 if beside else 0)


def stepped_on_host(config: RunConfig, shape: Architecture) -> int:
    """Parameters that the fullest rank steps on the host."""
    _, _, trained, experts = _of_fullest_rank(config, shape)
    shards, copies = _copies(config)
    return ceil(
        config.trainer.optimizer.offload * (ceil((trained - experts) / shards) + ceil(experts / copies))
    )


def _fsdp_memory(config: RunConfig, shape: Architecture) -> list[MemoryPart]:
    """Memory of a rank of FSDP: its share of all state, and what it gathers to compute."""
    t, width = config.trainer, 2 if config.dtype == "bfloat16" else 4
    shards, _ = _copies(config)
    adapters = _adapters(config, shape)
    trained = -(-(adapters or shape.parameters) // shards)
    frozen = [
        MemoryPart(f"weights, {config.dtype}, 1/{shards}", -(-shape.parameters // shards) * width),
        MemoryPart(f"adapters, fp32, 1/{shards}", trained * FP32),
    ]
    parts = [
        *(frozen if adapters else [MemoryPart(f"weights, fp32, 1/{shards}", trained * FP32)]),
        MemoryPart(f"gradients, fp32, 1/{shards}", trained * FP32),
        *_optimizer(config, adapters or shape.parameters, 0),
        _gathered(config, shape, adapters),
        MemoryPart("activations of a pack (estimate)", _activations(config, shape, width)),
        MemoryPart(
            f"logits of {t.logprob_chunk_tokens} tokens, fp32",
            LOGIT_COPIES * t.logprob_chunk_tokens * shape.vocab * FP32,
        ),
    ]
    if config.algorithm.kl_coef > 0:
        parts.append(MemoryPart("the policy, put aside for the reference", trained * FP32))
    if config.algorithm.teacher:
        parts.append(MemoryPart("teacher", -(-_teacher(config, width) // shards)))
    return parts


def _gathered(config: RunConfig, shape: Architecture, adapters: int) -> MemoryPart:
    """What FSDP gathers: the blocks at work and the next ones; embedding and output layer, which stay until the end of a pass."""
    width = 2 if config.dtype == "bfloat16" else 4
    outside = shape.embedding * (1 if shape.tied else 2)
    layer = (shape.parameters - outside) // shape.layers
    at_once = min(shape.layers, 2 * max(1, GATHERED // layer))
    whole = outside + at_once * layer
    if not adapters:
        return MemoryPart(f"gathered weights, {config.dtype}, and their gradients", whole * (width + FP32))
    pairs = at_once * -(-adapters // shape.layers)
    return MemoryPart(
        f"gathered weights, {config.dtype}, and gradients of adapters", whole * width + pairs * (width + FP32)
    )


def _adapters(config: RunConfig, shape: Architecture) -> int:
    """Numbers in the adapters; 0 if all weights are trained."""
    lora = config.trainer.lora
    return sum(parameters_of(each, lora.rank) for each in targeted(shape, lora.targets)) if lora else 0


def _adapters_of_rank(config: RunConfig, shape: Architecture) -> tuple[int, int]:
    """Numbers in the adapters of the rank of a pipeline that has the most, and how many of these are experts'."""
    lora, p = config.trainer.lora, config.trainer.parallel
    if lora is None:
        return 0, 0
    numbers: dict[int, tuple[int, int]] = {}
    for each in targeted(shape, lora.targets):
        every, experts = numbers.get(each.layer, (0, 0))
        if each.of_experts:
            own = parameters_of(each, lora.rank, p.tensor_of_experts)
            numbers[each.layer] = every + own, experts + own
        else:
            numbers[each.layer] = every + parameters_of(each, lora.rank, p.tensor), experts
    held = []
    for layers in layers_of_ranks(config, shape.layers):
        every, experts = map(sum, zip((0, 0), *(numbers.get(layer, (0, 0)) for layer in layers), strict=True))
        held.append((every - experts + -(-experts // p.expert), -(-experts // p.expert)))
    return max(held)


def host_memory(config: RunConfig, shape: Architecture, layout: Layout) -> list[MemoryPart]:
    """Host memory that ranks on GPUs use, of all ranks together. Empty without a trainer, or with a trainer on the CPU."""
    if layout.device != "cuda" or not layout.world_size:
        return []
    _, states = saved_bytes(config, shape)
    offload = config.trainer.optimizer.offload
    states *= config.trainer.parallel.replicate  # each copy's ranks hold them
    parts = []
    if offload:
        # the host has an fp32 weight beside the model's own, also if that is in fp32
        kept = ceil(offload * states / state_bytes(config)) * (3 * FP32)
        parts.append(MemoryPart("optimizer that is stepped there, fp32", kept))
        parts.append(MemoryPart("gradients and weights on their way, pinned", layout.world_size * ON_THE_WAY))
    if config.trainer_offloads and offload < 1:
        parts.append(MemoryPart("optimizer while engines generate, fp32", ceil((1 - offload) * states)))
    if config.saves_in_background and config.checkpoint.every < config.run.iterations:
        saved = sum(saved_bytes(config, shape))
        parts.append(MemoryPart("a checkpoint that is being written", saved))
    return parts


def saved_bytes(config: RunConfig, shape: Architecture) -> tuple[int, int]:
    """Bytes of the trained weights, and of the optimizer's state. A checkpoint holds both."""
    width = 2 if config.dtype == "bfloat16" else 4
    critic = critic_shape(config, shape)
    trained = (_adapters(config, shape) or shape.parameters) + (critic.parameters if critic else 0)
    if config.trainer.kind == "fsdp":  # the weights are the optimizer's own
        return trained * FP32, trained * state_bytes(config)
    return trained * width, trained * state_bytes(config)


def critic_shape(config: RunConfig, policy: Architecture) -> Architecture | None:
    """The critic's sizes; None without a critic. The policy's sizes, if the critic's folder cannot be read yet."""
    critic = config.algorithm.critic
    if critic is None or critic.path is None:
        return policy if critic else None
    try:
        return architecture(read_hf_config(critic.path, "algorithm.advantage.critic.path"))
    except ConfigError:
        return policy


def _teacher(config: RunConfig, width: int) -> int:
    assert config.algorithm.teacher is not None
    try:
        teacher = architecture(read_hf_config(config.algorithm.teacher, "algorithm.teacher"))
    except ConfigError:
        return 0
    return parameters_of_rank(config, teacher) * width


def _activations(config: RunConfig, shape: Architecture, width: int) -> int:
    """Activations kept for the backward pass, of all layers and of all packs in flight."""
    p, recompute = config.trainer.parallel, config.trainer.recompute
    layers, tokens = max(map(len, layers_of_ranks(config, shape.layers))), config.trainer.max_pack_tokens
    # the first rank holds a pack for each rank; with virtual stages it runs further ahead, by parts of its layers
    in_flight = p.pipeline if p.virtual == 1 else -(-((p.virtual + 1) * p.pipeline - 1) // p.virtual)
    times, ffn = shape.experts_used, shape.expert_ffn
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    streams = 4 * shape.hidden  # two residual sums and their norms
    dense = shape.ffn if len(shape.expert_layers) < shape.layers else 0
    gated = max(dense, times * ffn + shape.shared_ffn)
    inner = 2 * heads + shape.heads * shape.head_dim  # as projected and as attended
    if shape.output_gate:
        inner += 3 * shape.heads * shape.head_dim
    if shape.delta:  # a layer has attention or delta net, and the wider of the two counts for all
        inner = max(inner, shape.delta.kept)
    inner += 3 * gated
    if shape.experts:
        inner += times * (ffn + 2 * shape.hidden)  # weighted; moved to the experts and back
    if recompute == "selective":
        streams -= 2 * shape.hidden
        inner -= gated
    layer = tokens * width * ((streams // p.tensor if p.sequence else streams) + inner // p.tensor)
    at_once = tokens * shape.delta.at_once * FP32 // p.tensor if shape.delta else 0
    if recompute == "full":
        return layers * in_flight * tokens * shape.hidden * width + layer + at_once
    return layers * in_flight * layer + at_once


def engine_memory(config: RunConfig, shape: Architecture, layout: Layout) -> list[MemoryPart]:
    """Memory of one engine on each of its devices, by part."""
    width = 2 if config.dtype == "bfloat16" else 4
    devices = max(1, layout.gpus_an_engine)
    longest = config.data.max_prompt_tokens + config.rollout.longest_response
    tokens, waits = config.engines.cached(longest), ""
    if tokens is None or layout.engine_kind.sizes_cache:
        tokens = config.rollout.max_concurrency * longest
        waits = ", all that may be in flight: what finds no room waits"
    parts = [MemoryPart(f"weights, {config.dtype}", shape.parameters * width // devices)]
    if config.adapters_by_name:
        lora, slots = config.trainer.lora, config.adapter_slots
        assert lora is not None
        one = sum(parameters_of(each, lora.rank, devices) for each in targeted(shape, lora.targets))
        parts.append(MemoryPart(f"adapters of {slots} versions", slots * one * width))
    return [
        *parts,
        MemoryPart(
            f"KV cache of {tokens} tokens{waits}",
            tokens * shape.kv_bytes(width, devices, latents=layout.engine_kind.name != "embedded"),
        ),
    ]


BYTES_PER_TOKEN = 16  # stored bytes of rollouts, batch and rewards together, compressed
BYTES_PER_LOGPROB = 4


def disk(config: RunConfig, shape: Architecture, numbers: Numbers) -> list[MemoryPart]:
    """Files of the run by part, at most."""
    tokens = numbers.samples * (numbers.prompt_tokens + numbers.response_tokens)
    stored = numbers.samples * numbers.response_tokens if config.trainer.store_logprobs else 0
    return [
        *weights_on_disk(config, shape, numbers),
        MemoryPart(
            f"samples of {numbers.iterations} iterations (at most)",
            numbers.iterations * (tokens * BYTES_PER_TOKEN + stored * BYTES_PER_LOGPROB),
        ),
    ]


def weights_on_disk(config: RunConfig, shape: Architecture, numbers: Numbers) -> list[MemoryPart]:
    """Checkpoints and exports, which every run writes. A checkpoint is deleted when a later one is complete."""
    if config.pipeline.rollouts_only:
        return []
    width = 2 if config.dtype == "bfloat16" else 4
    checkpoint = sum(saved_bytes(config, shape))
    kept = len(numbers.checkpoints_kept) + (
        1 if len(numbers.checkpoints) > len(numbers.checkpoints_kept) else 0
    )
    exports = len(numbers.exports)
    return [
        MemoryPart("1 checkpoint" if kept == 1 else f"{kept} checkpoints at most at once", kept * checkpoint),
        MemoryPart(
            "1 export" if exports == 1 else f"{exports} exports",
            exports * (_adapters(config, shape) or shape.parameters) * width,
        ),
    ]


def files(config: RunConfig, root: str) -> list[str]:
    """Names of the files that the run writes."""
    parts = "prompts, batch, verdicts" + ("" if config.algorithm.supervised else ", rollouts/, rewards/")
    parts += ", logprobs/" if config.trainer.store_logprobs else ""
    last = config.run.iterations
    patterns = [
        f"{root}/run.json",
        f"{root}/iterations/000000 .. {last - 1:06d}/ (iterations 1 to {last}: {parts}, manifest.json)",
    ]
    if not config.pipeline.rollouts_only:
        patterns.append(f"{root}/checkpoints/NNNNNN/")
    if not config.pipeline.rollouts_only and (
        config.checkpoint.export_last or config.checkpoint.export_every
    ):
        patterns.append(f"{root}/exports/NNNNNN/")
    if config.evaluation.sets:
        patterns.append(f"{root}/eval/SET/NNNNNN.parquet")
    return patterns
