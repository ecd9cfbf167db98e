"""Rules of `trainer.lora`."""

import re
from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig
from millrace.core.families.adapters import USUAL, targeted
from millrace.core.families.architecture import Architecture

TARGETS = "trainer.lora.targets"


def problems(config: RunConfig) -> Iterator[Problem]:
    """Settings beside which the model's own weights would have to be trained, or be there twice."""
    lora = config.trainer.lora
    if lora is None:
        return
    if config.trainer.rank is not None:
        reason = "it is for megatron-core's trainer, and trainer.rank names yours"
        yield config.problem("trainer.lora", reason, "remove it, or trainer.rank")
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
    if not all(kind.names_adapters for kind in config.engines.kinds):
        reason = f"with engines.kind={config.engines.kind} engines may not be embedded ones, which alone serve adapters by name"
        yield config.problem("sync.lora", reason, f"{merged}, or engines.kind=embedded")
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


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except re.error:
        return None
