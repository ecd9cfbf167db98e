"""How a model fits the layout of the trainer's ranks: heads, channels, layers and experts that do not divide. Pure."""

from collections.abc import Iterator

from millrace.core.config.megatron_options import stages
from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import Architecture


def problems(config: RunConfig, shape: Architecture, whose: str = "model") -> Iterator[Problem]:
    """What of a model, whose sizes these are, the layout cannot divide."""
    yield from _tensor(config, shape, whose)
    yield from heads_problems(config, shape.heads, whose)
    yield from _delta_net(config, shape, whose)
    yield from stages.problems(config, shape.layers, whose)
    yield from _experts(config, shape, whose)


def _tensor(config: RunConfig, shape: Architecture, whose: str) -> Iterator[Problem]:
    p = config.trainer.parallel
    cut = {"attention heads": shape.heads}
    if shape.kv_heads % p.tensor and p.tensor % shape.kv_heads:
        cut["key-value heads"] = shape.kv_heads
    times = 2 if shape.output_gate else 1
    cut["rows of queries, keys and values"] = (times * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if len(shape.expert_layers) < shape.layers:
        cut["MLP channels"] = shape.ffn
    if shape.shared_ffn:
        cut["channels of the shared expert"] = shape.shared_ffn
    for name, size in cut.items():
        if size % p.tensor:
            yield Problem(
                "trainer.parallel.tensor",
                p.tensor,
                f"does not divide the {whose}'s {size} {name}",
                f"use a divisor of {size}",
            )
            break
    if shape.experts and shape.expert_ffn % p.tensor_of_experts:
        yield Problem(
            "trainer.parallel.tensor" if p.expert_tensor is None else "trainer.parallel.expert_tensor",
            p.tensor_of_experts,
            f"does not divide the {whose}'s {shape.expert_ffn} channels of an expert",
            f"set trainer.parallel.expert_tensor to a divisor of {shape.expert_ffn}",
        )


def heads_problems(config: RunConfig, heads: int, whose: str = "model") -> Iterator[Problem]:
    """Heads of attention that FSDP's context parallel ranks cannot share."""
    context = config.trainer.parallel.context
    if config.trainer.kind == "fsdp" and heads % context:
        yield Problem(
            "trainer.parallel.context",
            context,
            f"does not divide the {whose}'s {heads} attention heads",
            f"use a divisor of {heads}: a rank of FSDP attends over whole samples with some of the heads",
        )


def _delta_net(config: RunConfig, shape: Architecture, whose: str) -> Iterator[Problem]:
    p = config.trainer.parallel
    if shape.delta is None:
        return
    if config.trainer.kind == "fsdp":
        yield config.problem(
            "trainer.kind",
            f"transformers' layers of gated delta net in the {whose} would remember the samples before in a pack",
            "set it to megatron",
        )
        return
    heads = shape.delta.key_heads
    if heads % p.tensor:
        yield Problem(
            "trainer.parallel.tensor",
            p.tensor,
            f"does not divide the {heads} key heads of the {whose}'s delta net",
            f"use a divisor of {heads}",
        )
    elif heads // p.tensor % p.context:
        yield Problem(
            "trainer.parallel.context",
            p.context,
            f"does not divide the {heads // p.tensor} key heads of the {whose}'s delta net on a tensor parallel rank",
            f"use a divisor of {heads // p.tensor}: a rank computes whole sequences with some of the heads",
        )
    if p.tensor > 1 and not p.sequence and not shape.experts:
        yield Problem(
            "trainer.parallel.sequence",
            False,
            "delta net under tensor parallelism needs sequence parallelism",
            "set it to true",
        )


def _experts(config: RunConfig, shape: Architecture, whose: str) -> Iterator[Problem]:
    p = config.trainer.parallel
    if not shape.experts:
        usual = {"expert": 1, "expert_tensor": None}
        for name, value in usual.items():
            if getattr(p, name) != value:
                reason = f"the {whose} has no experts"
                yield Problem(f"trainer.parallel.{name}", getattr(p, name), reason, "leave it out")
        return
    if shape.experts % p.expert:
        yield Problem(
            "trainer.parallel.expert",
            p.expert,
            f"does not divide the {whose}'s {shape.experts} experts",
            f"use a divisor of {shape.experts}",
        )
    if shape.biases and p.tensor_of_experts > 1:
        yield Problem(
            "trainer.parallel.expert_tensor",
            p.tensor_of_experts,
            f"experts of the {whose} have biases, which are not cut over tensor parallel ranks",
            "set it to 1, so that each expert is whole on its ranks",
        )
    if p.tensor > 1 and not p.sequence:
        yield Problem(
            "trainer.parallel.sequence",
            False,
            "experts under tensor parallelism need sequence parallelism",
            "set it to true",
        )
