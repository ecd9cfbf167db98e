"""What a configuration will do, in numbers: how prompts become steps, where it runs, what it needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.config.architecture import parameters
from core.config.run import RunConfig
from core.retention import due

GIB = 2**30


def plan(config: RunConfig, hf: Mapping[str, Any] | None) -> dict[str, list[tuple[str, str]]]:
    """Lines of (what, how much) by heading. `hf`: the model's config.json, or None while it is still to be made."""
    sections = {"each iteration": _iteration(config), "where": _where(config), "kept": _kept(config)}
    if hf is not None:
        sections["model"] = _model(config, hf)
    return sections


def _iteration(config: RunConfig) -> list[tuple[str, str]]:
    r = config.rollout
    spare = round(config.filter.refill_factor * r.prompts)
    return [
        (
            "prompts",
            f"{r.prompts} of {len(config.data.sources)} source(s), {spare} in reserve for dropped groups",
        ),
        ("samples", f"{r.prompts} × {r.samples_per_prompt} = {config.samples_per_iteration}"),
        ("longest sample", f"{config.data.max_prompt_tokens} + {r.sampling.max_new_tokens} tokens"),
        (
            "steps",
            f"{config.samples_per_iteration} / {config.global_batch} = {config.steps_per_iteration}, "
            f"{config.run.iterations * config.steps_per_iteration} in {config.run.iterations} iterations",
        ),
        (
            "samples a rank and step",
            f"{config.global_batch / config.data_parallel:g}, in packs of up to {config.trainer.max_pack_tokens} tokens",
        ),
        (
            "algorithm",
            f"{config.algorithm.preset or 'own'}: advantage {config.algorithm.advantage}, loss {config.algorithm.loss}, mean {config.algorithm.aggregation}",
        ),
    ]


def _where(config: RunConfig) -> list[tuple[str, str]]:
    p, t = config.trainer.parallel, config.trainer
    return [
        (
            "trainer",
            f"{t.world_size} rank(s) on {t.device}: tensor {p.tensor}, pipeline {p.pipeline}, context {p.context}, expert {p.expert}, data {config.data_parallel}",
        ),
        ("engines", f"{config.engines.count} × {config.engines.kind} on {config.engines.host}"),
        ("scoring", f"{config.reward.workers} process(es), {config.reward.function}"),
        ("Ray", config.placement.ray_address or "a local head"),
    ]


def _kept(config: RunConfig) -> list[tuple[str, str]]:
    c, total = config.checkpoint, config.run.iterations
    times = sum(due(done, config.evaluation.every) or done == total for done in range(1, total + 1)) + 1
    every = f", and every {c.keep_every}" if c.keep_every else ""
    return [
        ("run folder", f"{config.storage.root.rstrip('/')}/{config.run.name}"),
        ("checkpoints", f"every {c.every} iterations and the last; {c.keep_last} newest kept{every}"),
        ("evaluations", f"{times if config.evaluation.sets else 0} of {len(config.evaluation.sets)} set(s)"),
        (
            "MLflow",
            f"{config.tracking.uri or 'a SQLite file in MILLRACE_HOME'}, experiment {config.run.experiment}",
        ),
    ]


def _model(config: RunConfig, hf: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Sizes; memory counts weights, gradients in fp32 and Adam's fp32 master weights and moments, without activations."""
    count = parameters(hf)
    p = config.trainer.parallel
    width = 2 if config.model.dtype == "bfloat16" else 4
    shard = count / (p.tensor * p.pipeline)
    spread = config.data_parallel if config.trainer.optimizer.distributed else 1
    state = shard * (width + 4) + shard * 12 / spread
    return [
        (
            "architecture",
            f"{hf.get('model_type')}, {count / 1e6:,.1f} million parameters in {config.model.dtype}",
        ),
        ("trainer memory a rank", f"{_size(state)} of weights, gradients and optimizer, and activations"),
        ("weights an engine", f"{_size(count * width)}, and its KV cache"),
        ("a checkpoint", f"{_size(count * (width + 12))} on storage"),
    ]


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
