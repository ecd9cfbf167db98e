"""Rules of `trainer.lora`."""

import re
from collections.abc import Iterator, Sequence

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig
from millrace.core.families.adapters import USUAL, Matrix, matrices, targeted
from millrace.core.families.architecture import Architecture

TARGETS = "trainer.lora.targets"
PARTNERS = {"q_proj": "v_proj", "v_proj": "q_proj", "k_proj": "q_proj", "up_proj": "gate_proj"}


def problems(config: RunConfig) -> Iterator[Problem]:
    """Settings beside which the model's own weights would have to be trained, or be there twice."""
    lora = config.trainer.lora
    if lora is None:
        return
    if config.trainer.rank is not None:
        reason, remedy = config.trainer.not_megatron
        yield config.problem("trainer.lora", reason, remedy)
    if _pattern(lora.targets) is None:
        yield config.problem(TARGETS, "it is no regular expression", f"write one such as {USUAL}")
    if config.algorithm.reference is not None:
        yield config.problem(
            "algorithm.reference",
            "with trainer.lora the reference is the model without what the adapters have learnt; another folder would be a second "
            "whole model",
            "leave it out, or trainer.lora",
        )
    for name in sorted({"moe_aux_loss_coeff", "moe_z_loss_coeff"} & set(config.trainer.megatron)):
        yield Problem(
            f"trainer.megatron.{name}",
            config.trainer.megatron[name],
            "it trains routers, which stay as they are with trainer.lora",
            "remove it",
        )


def by_name_problems(config: RunConfig) -> Iterator[Problem]:
    """Settings beside which engines cannot serve adapters by name."""
    if config.sync.lora != "names":
        return
    merged = "set it to merged"
    if config.trainer.lora is None:
        yield config.problem(
            "sync.lora", "only trainer.lora makes adapters", "leave it out, or set trainer.lora"
        )
    if config.engines.router:
        yield config.problem(
            "sync.lora", "engines.router does not know which engine has which adapter", merged
        )
    if config.sync.kind in ("ipc", "broadcast"):
        yield config.problem(
            "sync.lora", f"adapters go as a folder, and sync.kind={config.sync.kind} moves weights", merged
        )
    if config.pipeline.ahead and config.pipeline.on_update == "finish":
        reason = "pipeline.on_update=finish has engines wait for requests, and adapters by name need not wait"
        yield config.problem("sync.lora", reason, "set pipeline.on_update=keep")
    if config.evaluation.background:
        reason = (
            "evaluation.background keeps a version for as long as it takes, and engines have no room for it"
        )
        yield config.problem("sync.lora", reason, merged)
    if config.sync.by_url:
        yield config.problem("sync.lora", "adapters go by a folder, and sync.directory is a URL", merged)
    yield from _sglang_problems(config)


def _sglang_problems(config: RunConfig) -> Iterator[Problem]:
    """Ways to run SGLang in which it loads no adapter while it serves, or loses the weights beside the adapters."""
    e, merged = config.engines, "or sync.lora=merged"
    if config.engines_sleep:
        yield config.problem(
            "placement.offload_engines",
            "engines that share GPUs (placement.colocate) lose their weights with their memory, and only adapters are sent to them "
            "(sync.lora=names)",
            f"set it to false, {merged}",
        )
    if e.nodes > 1:
        reason = "adapters by name (sync.lora) are loaded on one node"
        yield config.problem("engines.nodes", reason, f"leave it out, {merged}")
    if e.prefill:
        reason = (
            "an adapter has another name on each engine (sync.lora=names), and two would answer one request"
        )
        yield config.problem("engines.prefill", reason, f"leave it out, {merged}")
    for name in sorted({"speculative_algorithm", "enable_dp_attention"} & set(e.sglang)):
        reason = "SGLang does not promise it beside adapters (sync.lora=names)"
        yield Problem(f"engines.sglang.{name}", e.sglang[name], reason, f"remove it, {merged}")


def model_problems(config: RunConfig, arch: Architecture) -> Iterator[Problem]:
    """Targets that the model does not have, or that cannot have adapters in this layout."""
    lora, p = config.trainer.lora, config.trainer.parallel
    if lora is None or _pattern(lora.targets) is None:
        return
    found = targeted(arch, lora.targets)
    other = next((matrix for matrix in found if not matrix.supported), None)
    if not found:
        reason = f"it matches no matrix of this {arch.family} model"
        yield config.problem(TARGETS, reason, f"leave it out, or write one such as {USUAL}")
    elif other is not None:
        reason = f"it matches {other.name}, and adapters of {other.kind} are not supported"
        yield config.problem(TARGETS, reason, "leave it out, or name other matrices")
    elif config.trainer.kind == "fsdp" and (expert := _expert(found)) is not None:
        reason = f"it matches {expert}, and FSDP's trainer has the experts of a layer in one tensor"
        yield config.problem(TARGETS, reason, "leave experts out, or set trainer.kind=megatron")
    elif (apart := _apart(found, arch)) is not None:
        yield config.problem(
            TARGETS,
            f"it matches {apart[0]} and not {apart[1]}, and the experts of a layer are computed together",
            "match gate and up projections of all experts, or of none, and so of down projections",
        )
    elif config.adapters_by_name and (problem := _unserved(config, found, arch)) is not None:
        yield config.problem(TARGETS, *problem)
    elif p.pipeline > 1 and len({matrix.layer for matrix in found}) < arch.layers:
        yield config.problem(
            TARGETS,
            "it matches nothing in some layers, and a stage without adapters has nothing to train",
            "match a matrix of each layer, or set trainer.parallel.pipeline=1",
        )
    elif arch.kv_heads % p.tensor and any(matrix.part.form == "heads" for matrix in found):
        yield config.problem(
            "trainer.parallel.tensor",
            f"it does not divide the model's {arch.kv_heads} key-value heads, which adapters of trainer.lora need",
            "lower it, or leave queries, keys and values out of trainer.lora.targets",
        )


def unknown_problems(config: RunConfig, family: str) -> Iterator[Problem]:
    """Adapters of a model whose matrices are not known."""
    if config.trainer.lora is not None:
        reason = (
            f"the matrices of {family} models are not known here, and adapters are added to matrices by name"
        )
        yield config.problem("trainer.lora", reason, "leave it out")


def _expert(found: Sequence[Matrix]) -> str | None:
    """A matrix of an expert, if there is one."""
    return next((matrix.name for matrix in found if matrix.of_experts), None)


def _apart(found: Sequence[Matrix], arch: Architecture) -> tuple[str, str] | None:
    """A matrix of an expert that has an adapter, and one of the same layer and parameter that has none; None if there are none."""
    named = {matrix.name for matrix in found}
    own = {(matrix.layer, matrix.part.parameter): matrix.name for matrix in found if matrix.of_experts}
    if not own:
        return None
    for matrix in matrices(arch):
        with_one = own.get((matrix.layer, matrix.part.parameter))
        if with_one is not None and matrix.name not in named:
            return with_one, matrix.name
    return None


def _unserved(config: RunConfig, found: Sequence[Matrix], arch: Architecture) -> tuple[str, str] | None:
    """Why engines do not serve adapters of these matrices by name, and the remedy; None if they do."""
    remedy = "match both, or set sync.lora=merged"
    if (alone := _alone(found)) is not None:
        return f"SGLang joins {alone[1]} to {alone[2]}, and {alone[0]} alone matches", remedy
    ends = {
        (matrix.layer, matrix.name.rpartition(".")[2]): matrix.name for matrix in found if matrix.of_experts
    }
    for (layer, end), name in ends.items():
        other = "gate_proj" if end == "down_proj" else "down_proj"
        if (layer, other) not in ends:
            return (
                f"SGLang computes both products of experts with adapters, and {name} matches without {other}",
                remedy,
            )
    if arch.shared_gate and any(kind.runs_on != "cpu" for kind in config.engines.kinds):
        gated = next((matrix.name for matrix in found if matrix.of_experts or matrix.of_shared), None)
        if gated is not None:
            return (
                f"it matches {gated}, and SGLang takes shared experts with a gate to be as wide as dense MLPs",
                "leave experts out, or set sync.lora=merged",
            )
    return None


def _alone(found: Sequence[Matrix]) -> tuple[str, str, str] | None:
    """A matrix without its partner in SGLang's joined layers: its name, its projection and the partner's.

    SGLang fills a missing key or up projection with zeros; of queries and values, and of gates, it takes none alone.
    """
    names = {matrix.name for matrix in found}
    for name in sorted(names):
        place, _, end = name.rpartition(".")
        partner = PARTNERS.get(end)
        if partner is not None and f"{place}.{partner}" not in names:
            return name, end, partner
    return None


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except re.error:
        return None
