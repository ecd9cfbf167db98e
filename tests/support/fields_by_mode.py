"""Every field of the configuration in every mode: whether setting it acts, is refused, or is named as having no effect.

`python -m tests.support.fields_by_mode` writes the table that is kept in tests/golden/fields_by_mode.txt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.section import models
from millrace.core.config.plan.without_effect import idle_because
from millrace.core.config.reading.load import validate
from millrace.core.config.reading.overrides import apply
from millrace.core.config.rules import between_fields
from millrace.core.config.run_config import RunConfig
from millrace.flows.driver.rollouts_source import MADE_BY
from tests.support.settings_table import ROWS

KEPT = Path(__file__).parent.parent / "golden" / "fields_by_mode.txt"
Outcome = Literal["acts", "refused", "no effect"]
FUNCTION = "package.module:function"
BASE: dict[str, Any] = {
    "run": {"name": "a", "iterations": 20},
    "model": {"path": "model"},
    "data": {"max_prompt_tokens": 100, "sources": [{"name": "sums", "path": "sums.jsonl"}]},
    "rollout": {"prompts": 8, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 100}},
    "evaluation": {"sets": [{"name": "held", "path": "held.jsonl"}]},
}
WEIGHED = "algorithm.correction.kind=truncate"
GPUS = ["engines.kind=sglang", "trainer.device=cuda"]
MODES: dict[str, list[str]] = {
    "plain": [],
    "steps": ["trainer.global_batch=16"],
    "passes": ["trainer.passes=2"],
    "ahead": ["pipeline.ahead=1", WEIGHED],
    "finish": ["pipeline={select: finish, max_staleness: 1}", WEIGHED],
    "oversample": ["filter={drop_zero_variance: true, oversample: 0.5}"],
    "eager": ["pipeline.eager=true"],
    "sync_every": ["pipeline.sync_every=2", WEIGHED],
    "buffer": ["rollout.buffer.share=0.25", WEIGHED],
    "stratified_buffer": ["rollout.buffer.choose=stratified", WEIGHED],
    "rollouts_only": ["pipeline.rollouts_only=true"],
    "rollouts_from": ["pipeline.rollouts_from=b", "evaluation.sets=[]"],
    "sft": ["algorithm.loss=sft", "rollout.samples_per_prompt=1"],
    "sft_dialogues": [
        "algorithm.loss=sft",
        "rollout.samples_per_prompt=1",
        "data.sources.0.loss_on=assistant",
        "evaluation.sets.0.loss_on=assistant",
    ],
    "session": ["rollout.session={function: 'm:f', max_tokens: 100}"],
    "environment": ["rollout.session={environment: 'm:E', max_tokens: 100}"],
    "tools": ["rollout.session={tools: ['m:f'], max_tokens: 100}"],
    "mcp_command": ["rollout.session={tools: [{mcp: {command: [serve]}}], max_tokens: 100}"],
    "mcp_url": ["rollout.session={tools: [{mcp: {url: 'http://host'}}], max_tokens: 100}"],
    "named_rollouts": ["rollout.session={function: 'm:f', named: {solo: 'm:g'}, max_tokens: 100}"],
    "named_rewards": ["reward.named={code: 'm:f'}"],
    "own_rewards": ["data.sources.0.reward='m:f'", "evaluation.sets.0.reward='m:f'"],
    "own_filter": ["filter.group_filter='m:f'"],
    "own_buffer_filter": ["rollout.buffer.buffer_filter='m:f'", WEIGHED],
    "mixture": ["data.sources.1={name: words, path: words.jsonl}"],
    "curriculum": [
        "data.sources.0={name: sums, rows: 'm:f', levels: {}, pools: {}}",
        "data.stages=[{weights: {sums: 1}, iterations: 2}, {weights: {sums: 1}}]",
    ],
    "evaluation": ["evaluation.sets.0.samples_per_prompt=4"],
    "no_evaluation": ["evaluation.sets=[]"],
    "dr_grpo": ["algorithm.preset=dr_grpo"],
    "dapo": ["algorithm.preset=dapo"],
    "gspo": ["algorithm.preset=gspo", "trainer.global_batch=16"],
    "cispo": ["algorithm.preset=cispo"],
    "rloo": ["algorithm.preset=rloo"],
    "ppo": ["algorithm.preset=ppo", "algorithm.advantage.critic.schedule.kind=linear"],
    "reinforce_plus_plus": ["algorithm.preset=reinforce_plus_plus"],
    "reinforce_plus_plus_baseline": ["algorithm.preset=reinforce_plus_plus_baseline"],
    "max_rl": ["algorithm.preset=max_rl"],
    "opd": ["algorithm={preset: opd, teacher: teacher}"],
    "served_teacher": [
        "algorithm={preset: opd, teacher_server: {url: 'http://host/v1', protocol: vllm, model: t, hint: 'm:f'}}"
    ],
    "kl": ["algorithm={kl_coef: 0.1, kl_target: 0.1}", "trainer.schedule.kind=cosine"],
    "sapo": ["algorithm.loss=sapo"],
    "own_loss": ["algorithm.loss={kind: function, function: 'm:f'}"],
    "own_advantage": ["algorithm={advantage: {kind: function, function: 'm:f'}, shaping: 'm:f'}"],
    "embedded": ["engines.kind=embedded", "trainer.device=cpu"],
    "router": ["engines={kind: embedded, count: 2, router: {}}", "trainer.device=cpu"],
    "sglang": GPUS,
    "prefill": [*GPUS, "engines.count=3", "engines.prefill=2"],
    "over_nodes": [*GPUS, "engines.gpus=4", "engines.nodes=2", "placement.tensor_over_hosts=true"],
    "parallel": ["trainer.world_size=8", "trainer.parallel={tensor: 2, sequence: true}"],
    "pipelined": ["trainer.world_size=4", "trainer.parallel.pipeline=2"],
    "shared_gpus": [*GPUS, "placement.colocate=true"],
    "external": ["engines={kind: external, addresses: ['http://127.0.0.1:30000'], key: '${env:KEY}'}"],
    "disk": ["sync={kind: disk, directory: /shared}"],
    "ipc": [*GPUS, "placement.colocate=true", "sync.kind=ipc"],
    "broadcast": [*GPUS, "sync.kind=broadcast"],
    "fsdp": ["trainer.kind=fsdp"],
    "fsdp_of_two": ["trainer.kind=fsdp", "trainer.world_size=2"],
    "adapters_by_name": ["trainer.lora={}", "sync.lora=names", "engines.kind=embedded", "trainer.device=cpu"],
    "shards": ["placement={task_runner: ray, ray_address: 'head:6379'}", "rollout.shards=2"],
    "tensorboard": ["tracking.trackers=[tensorboard]"],
}
ANOTHER: dict[str, Any] = {  # where a value of the type is not one of the field
    "run.seed": 7,
    "run.name": "other",
    "run.experiment": "other",
    "run.import_from": ["modules"],
    "model.revision": "main",
    "model.preset": "qwen3-0.6b",
    "data.sources.0.path": "others.jsonl",
    "data.sources.0.extra_keys": ["more"],
    "data.sources.0.levels.first": 1,
    "data.sources.0.levels.last": 7,
    "data.sources.0.pools.solved_from": 0.9,
    "data.sources.0.pools.unsolved_to": 0.1,
    "data.stages.0.weights": {"sums": 2},
    "data.max_prompt_tokens": 90,
    "rollout.prompts": 16,
    "rollout.samples_per_prompt": 8,
    "rollout.sampling.temperature": 0.5,
    "rollout.sampling.max_new_tokens": 90,
    "rollout.sampling.stop_token_ids": [1],
    "rollout.sampling.stop_regex": ["x+"],
    "rollout.session.max_tokens": 90,
    "rollout.session.tools.0.mcp.command": ["serve", "here"],
    "rollout.session.tools.0.mcp.url": "http://other",
    "rollout.session.tools.0.mcp.env": {"A": "b"},
    "rollout.session.tools.0.mcp.headers": {"A": "b"},
    "rollout.session.max_rollouts": 8,
    "rollout.buffer.share": 0.5,
    "rollout.flush_tokens": 64,
    "reward.memory_mb": 512,
    "filter.reward_band": [0.1, 0.9],
    "algorithm.preset": "dapo",
    "algorithm.loss.temperatures": [2.0, 3.0],
    "algorithm.loss.dual_clip": 8.0,
    "algorithm.correction.low": 0.1,
    "algorithm.correction.high": 3.0,
    "algorithm.correction.veto": 0.1,
    "algorithm.correction.max_token_age": 0,
    "algorithm.overlong.buffer_tokens": 10,
    "algorithm.teacher_server.url": "http://other/v1",
    "algorithm.teacher_server.key": "${env:OTHER}",
    "trainer.optimizer.betas": [0.8, 0.9],
    "trainer.optimizer.lr": 2e-6,
    "trainer.schedule.min_lr": 1e-8,
    "trainer.schedule.warmup_steps": 1,
    "algorithm.advantage.critic.schedule.min_lr": 1e-8,
    "algorithm.advantage.critic.schedule.warmup_steps": 1,
    "trainer.global_batch": 8,
    "trainer.megatron": {"moe_z_loss_coeff": 0.1},
    "trainer.world_size": 4,
    "engines.addresses": ["http://127.0.0.1:30001"],
    "engines.key": "${env:OTHER}",
    "engines.gpus": 2,
    "engines.nodes": 4,
    "engines.count": 2,
    "engines.prefill": 1,
    "evaluation.sets.0.path": "others.jsonl",
    "evaluation.sets.0.extra_keys": ["more"],
    "evaluation.sets.0.sampling.temperature": 0.5,
    "evaluation.sets.0.sampling.max_new_tokens": 90,
    "evaluation.sets.0.sampling.stop_token_ids": [1],
    "evaluation.sets.0.sampling.stop_regex": ["x+"],
    "tracking.uri": "sqlite:////tmp/other.db",
    "tracking.trackers": ["mlflow", "tensorboard"],
    "checkpoint.every": 4,
    "checkpoint.keep_every": 20,
    "checkpoint.keep_best": "eval/held/reward_mean",
    "checkpoint.export_every": 4,
    "evaluation.every": 4,
    "run.iterations": 40,
    "algorithm.advantage.kind": "leave_one_out",
    "algorithm.loss.kind": "sapo",
    "engines.kind": "embedded",
    "sync.kind": "disk",
    "sync.max_logprob_gap": 0.5,
    "rollout.sampling.top_k": 5,
    "rollout.sampling.logit_bias": {1: 1.0},
    "evaluation.sets.0.sampling.top_k": 5,
    "evaluation.sets.0.sampling.logit_bias": {1: 1.0},
    "algorithm.teacher_server.protocol": "vllm",
    "trainer.parallel.tensor": 4,
    "trainer.parallel.pipeline": 2,
    "trainer.parallel.virtual": 2,
    "trainer.parallel.context": 2,
    "trainer.parallel.replicate": 2,
    "trainer.parallel.expert": 2,
    "trainer.parallel.expert_tensor": 2,
    "trainer.megatron_ddp": {"bucket_size": 1000},
    "trainer.megatron_optimizer": {"decoupled_weight_decay": False},
    "engines.sglang": {"mem_fraction_static": 0.5},
    "engines.router.options": {"cache_threshold": 0.5},
}
KINDS = {  # where a kind is that of the mode already
    "algorithm.advantage.kind": "max_rl",
    "algorithm.loss.kind": "cispo",
    "engines.kind": "auto",
    "sync.kind": "auto",
    "algorithm.preset": "grpo",
    "algorithm.teacher_server.protocol": "openai",
}


SECTIONS: dict[str, list[str]] = {  # that a mode may lack, and what makes them
    "run.prepare": ["run.prepare='m:f'"],
    "data.sources.0.rows": ["data.sources.0.path=''", "data.sources.0.rows='m:f'"],
    "data.sources.0.levels": [
        "data.sources.0.path=''",
        "data.sources.0.rows='m:f'",
        "data.sources.0.levels={}",
    ],
    "data.sources.0.pools": ["data.sources.0.pools={}"],
    "data.sources.0.reward": ["data.sources.0.reward='m:f'"],
    "data.stages": ["data.stages=[{weights: {sums: 1}, iterations: 2}, {weights: {sums: 1}}]"],
    "reward.named": ["reward.named={code: 'm:f'}"],
    "filter.group_filter": ["filter.group_filter='m:f'"],
    "rollout.buffer": ["rollout.buffer={}"],
    "rollout.buffer.buffer_filter": ["rollout.buffer.buffer_filter='m:f'"],
    "rollout.session": ["rollout.session={function: 'm:f', max_tokens: 100}"],
    "rollout.session.function": ["rollout.session={function: 'm:f', max_tokens: 100}"],
    "rollout.session.environment": ["rollout.session={environment: 'm:E', max_tokens: 100}"],
    "rollout.session.named": ["rollout.session={function: 'm:f', named: {solo: 'm:g'}, max_tokens: 100}"],
    "rollout.session.tools": ["rollout.session={tools: ['m:f'], max_tokens: 100}"],
    "rollout.session.tools.0.mcp": ["rollout.session={tools: [{mcp: {command: [serve]}}], max_tokens: 100}"],
    "algorithm.overlong": ["algorithm.overlong={}"],
    "algorithm.shaping": ["algorithm.shaping='m:f'"],
    "algorithm.teacher_server": [
        "algorithm.teacher_server={url: 'http://host/v1', protocol: vllm, model: t, hint: 'm:f'}",
        "algorithm.distillation_coef=1.0",
        "algorithm.teacher=null",
    ],
    "algorithm.advantage.critic.schedule": ["algorithm.advantage={kind: gae, critic: {schedule: {}}}"],
    "engines.router": ["engines.router={}"],
    "trainer.lora": ["trainer.lora={}"],
    "evaluation.sets": ["evaluation.sets=[{name: held, path: held.jsonl}]"],
    "evaluation.sets.0.reward": ["evaluation.sets=[{name: held, path: held.jsonl, reward: 'm:f'}]"],
}
SECTIONS["algorithm.teacher_server.hint"] = SECTIONS["algorithm.teacher_server"]
CHOICES = ("algorithm.advantage.kind", "algorithm.loss.kind", "algorithm.preset", "engines.kind", "sync.kind")
"""Fields that the other fields of their section follow from."""
CONSEQUENCES = {  # a change without which another field cannot stay as the mode has it, and the field that is named
    ("curriculum", "data.sources.0.name"): "data.stages.0.weights.sums",
    ("ppo", "algorithm.preset"): "algorithm.advantage.critic",
    ("served_teacher", "algorithm.preset"): "algorithm.distillation_coef",
    ("opd", "algorithm.preset"): "algorithm.distillation_coef",
    ("reinforce_plus_plus", "algorithm.advantage.kind"): "algorithm.kl_placement",
    ("reinforce_plus_plus", "algorithm.kl_placement"): "algorithm.kl_kind",
    ("sft", "algorithm.loss.kind"): "rollout.samples_per_prompt",
}
ITEMS = ("sums", "held", "words", "solo", "code")  # that problems name where paths have numbers


class UnnamedRefusalError(Exception):
    """A value is refused, and no problem names its field."""


def leaves(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every field of the types with its path, in all kinds of every choice, and the section that has it."""
    for name, field in model.model_fields.items():
        below = models(field.annotation)
        inside = f"{above}{name}.0." if get_origin(field.annotation) is list else f"{above}{name}."
        for section in below:
            yield from leaves(section, inside)
        if not below:
            yield f"{above}{name}", model


@cache
def sections() -> dict[str, list[type[BaseModel]]]:
    """The sections that have a field, by its path."""
    found: dict[str, list[type[BaseModel]]] = {}
    for path, section in leaves(RunConfig):
        found.setdefault(path, []).append(section)
    return found


@cache
def mode_values(mode: str) -> dict[str, Any]:
    """The values of a mode, as a file has them."""
    values = copy.deepcopy(BASE)
    for override in MODES[mode]:
        apply(values, override)
    return values


@cache
def mode_config(mode: str) -> RunConfig:
    """The configuration of a mode, with which nothing is wrong."""
    config, wrong = validate(mode_values(mode))
    assert config is not None, f"{mode}: {wrong}"
    assert not (wrong := between_fields(config)), f"{mode}: {wrong}"
    return config


def another(path: str, section: type[BaseModel], value: Any) -> Any:
    """A value of the field that is not this one."""
    if path in ANOTHER and ANOTHER[path] != value:
        return ANOTHER[path]
    if path in KINDS:
        return KINDS[path]
    choices = literals(section.model_fields[path.rpartition(".")[2]].annotation)
    if choices:
        return next(choice for choice in choices if choice not in (value, None))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.5 if value != 0.5 else 0.25
    if isinstance(value, dict):
        return {"a": 1}
    if isinstance(value, list):
        return ["x"]
    kind = str(section.model_fields[path.rpartition(".")[2]].annotation)
    if "str" in kind:
        return "m:other" if path.endswith("function") else "other"
    return 0.5 if "float" in kind else True if "bool" in kind else {"a": 1} if "dict" in kind else 2


def literals(annotation: Any) -> list[Any]:
    """The values of the Literal of an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in literals(part)]


def changed(section: Any, parts: Sequence[str], path: str) -> Any:
    """A copy of a section in which the field has another value. Raises LookupError if it is not there."""
    first, *rest = parts
    if isinstance(section, list):
        number = int(first)
        item = changed(section[number], rest, path)
        return [*section[:number], item, *section[number + 1 :]]
    if not isinstance(section, BaseModel) or first not in type(section).model_fields:
        raise LookupError(first)
    value = getattr(section, first)
    new = changed(value, rest, path) if rest else another(path, type(section), value)
    return section.model_copy(update={first: new})


def outcome(mode: str, path: str) -> Outcome:
    """What becomes of a run of the mode in which the field has another value. A section that the mode lacks is made first."""
    config, wrong = with_another(mode, path)
    wrong = wrong or between_fields(config)
    if not wrong and _must_be_the_other_runs(config, path):
        return "refused"
    if not wrong:
        return "acts" if idle_because(config, path) is None else "no effect"
    expected = CONSEQUENCES.get((mode, path))
    if not any(_names(problem, path) or problem.field == expected for problem in wrong):
        raise UnnamedRefusalError(f"{mode}: {path}: {[str(problem) for problem in wrong]}")
    return "refused"


def with_another(mode: str, path: str) -> tuple[RunConfig, list[Problem]]:
    parts = path.split(".")
    if path in CHOICES:
        values = copy.deepcopy(mode_values(mode))
        above = parts[:-1]
        value = another(path, sections()[path][0], _now(mode_config(mode), parts))
        apply(values, f"{'.'.join(above)}={value}" if parts[-1] == "kind" else f"{path}={value}")
        config, wrong = validate(values)
        return config or mode_config(mode), wrong
    config = mode_config(mode)
    section = max((name for name in SECTIONS if path.startswith(f"{name}.")), key=len, default=None)
    if section is not None and _now(config, section.split(".")) in (None, []):
        config, wrong = _with_section(mode, section)
        if wrong:
            return config, wrong
    try:
        return changed(config, parts, path), []
    except LookupError:
        kind = f"{path.rpartition('.')[0]} has no such field"  # which a test of the types holds
        return config, [Problem(path, None, kind, "remove it")]


@cache
def _with_section(mode: str, section: str) -> tuple[RunConfig, list[Problem]]:
    values = copy.deepcopy(mode_values(mode))
    for override in SECTIONS[section]:
        apply(values, override)
    config, wrong = validate(values)
    return config or mode_config(mode), wrong


def _now(section: Any, parts: Sequence[str]) -> Any:
    """The value in a configuration; None if its section is not there."""
    for part in parts:
        if isinstance(section, list):
            section = section[int(part)] if int(part) < len(section) else None
        else:
            section = getattr(section, part, None)
    return section


def _must_be_the_other_runs(config: RunConfig, path: str) -> bool:
    """Whether `millrace check` compares the field with the run that pipeline.rollouts_from names, and refuses another value."""
    made_by = any(path == name or path.startswith(f"{name}.") for name in MADE_BY)
    if config.pipeline.rollouts_from is None or not made_by or path == "model.dtype":
        return False
    return not ROWS[path].resume


def _names(problem: Problem, path: str) -> bool:
    """Whether a problem is of the field or of a section that it is in, or names one of the two."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    within = [".".join(parts[:end]) for end in range(2, len(parts) + 1)]
    field = ".".join(part for part in problem.field.split(".") if part not in ITEMS and not part.isdigit())
    return field in within or any(name in str(problem) for name in within)


def table() -> dict[str, dict[str, Outcome]]:
    """The outcome of every field in every mode."""
    return {path: {mode: outcome(mode, path) for mode in MODES} for path in ROWS}


def as_text(found: dict[str, dict[str, Outcome]]) -> str:
    """The table with a line a field: what most modes make of it, then the others."""
    lines = []
    for path, row in found.items():
        kinds = list(row.values())
        most: Outcome = max(("acts", "refused", "no effect"), key=kinds.count)
        others = [
            f"{kind} in {' '.join(mode for mode, made in row.items() if made == kind)}"
            for kind in ("acts", "refused", "no effect")
            if kind != most and kind in kinds
        ]
        lines.append(f"{path}: {most}" + (f"; {'; '.join(others)}" if others else ""))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    KEPT.write_text(as_text(table()), encoding="utf-8")
