"""What fields of different sections demand of each other. Each rule says which fields clash and how to mend it.

Owns rules that need nothing but the configuration; what it names (files, functions, servers) is touched by millrace.flows.preflight.check.
Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Any
from urllib.parse import urlsplit

from millrace.core.config import algorithm_rules, engine_rules
from millrace.core.config.model import Source
from millrace.core.config.passthrough import (
    MEGATRON_ELSEWHERE,
    MEGATRON_REFUSED,
    ROUTER_OWNED,
    ROUTER_REFUSED,
    SECRETS,
    SGLANG_ELSEWHERE,
    SGLANG_OWNED,
    SGLANG_REFUSED,
)
from millrace.core.config.problems import Problem
from millrace.core.config.run import RunConfig
from millrace.core.config.training import EvalSet


def problems(config: RunConfig) -> list[Problem]:
    """Everything that fields say against each other, all at once; empty when they agree."""
    found = [*_batch(config), *_parallel(config), *_lengths(config), *_sampling(config), *_optimizer(config)]
    found += algorithm_rules.problems(
        config.algorithm,
        config.rollout,
        filter=config.filter,
        steps_per_iteration=max(1, config.steps_per_iteration),
    )
    found += [*_supervised(config), *_names(config), *_intervals(config), *_places(config)]
    found += [*engine_rules.problems(config), *_passthrough(config)]
    return found


def _batch(config: RunConfig) -> Iterator[Problem]:
    samples, batch = config.samples_per_iteration, config.global_batch
    if samples % batch:
        near = max((n for n in range(1, min(batch, samples) + 1) if samples % n == 0), default=1)
        yield Problem(
            "trainer.global_batch",
            batch,
            f"rollout.prompts × rollout.samples_per_prompt = {samples} samples an iteration are not a whole number of steps",
            f"set it to a divisor of {samples} such as {near}, or leave it out for one step an iteration",
        )


def _parallel(config: RunConfig) -> Iterator[Problem]:
    world, p = config.trainer.world_size, config.trainer.parallel
    model = p.tensor * p.pipeline * p.context
    if world % model:
        yield Problem(
            "trainer.world_size",
            world,
            f"does not divide by parallel.tensor × pipeline × context = {p.tensor} × {p.pipeline} × {p.context} = {model}",
            f"set it to a multiple of {model}, or lower trainer.parallel",
        )
    elif world % (p.expert * p.pipeline):
        yield Problem(
            "trainer.parallel.expert",
            p.expert,
            f"expert × pipeline = {p.expert * p.pipeline} does not divide trainer.world_size = {world}",
            "lower it, or raise trainer.world_size",
        )
    if p.sequence and p.tensor == 1:
        yield Problem(
            "trainer.parallel.sequence",
            True,
            "it splits sequences over tensor parallel ranks, and parallel.tensor is 1",
            "set it to false, or parallel.tensor to 2 or more",
        )


def _lengths(config: RunConfig) -> Iterator[Problem]:
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    p = config.trainer.parallel
    room = config.trainer.max_pack_tokens * p.context
    align = (2 * p.context if p.context > 1 else 1) * (p.tensor if p.sequence else 1)
    padded = -(-longest // align) * align
    if padded > room:
        yield Problem(
            "trainer.max_pack_tokens",
            config.trainer.max_pack_tokens,
            f"a sample may have data.max_prompt_tokens + rollout.sampling.max_new_tokens = {longest} tokens, which no pack "
            f"of {room} holds",
            f"set it to {-(-padded // p.context)} or more, or lower one of the two",
        )
    if not _embedded_possible(config):
        return
    held = config.engines.max_total_tokens
    for field, sampling in config.samplings:
        needed = config.data.max_prompt_tokens + sampling.max_new_tokens
        if needed > held:
            yield Problem(
                "engines.max_total_tokens",
                held,
                f"one sample may need data.max_prompt_tokens + {field}.max_new_tokens = {needed} tokens of KV cache",
                f"set it to {needed} or more",
            )
            return


def _sampling(config: RunConfig) -> Iterator[Problem]:
    for place, sampling in config.samplings:
        if "" in sampling.stop:
            yield Problem(
                f"{place}.stop",
                sampling.stop,
                "an empty string ends every response at once",
                "remove it from the list",
            )
        if any(token < 0 for token in sampling.stop_token_ids):
            yield Problem(
                f"{place}.stop_token_ids",
                sampling.stop_token_ids,
                "no token has a negative id",
                "remove it",
            )
        if sampling.top_k == 0:
            yield Problem(
                f"{place}.top_k",
                0,
                "no token would be left to sample",
                "set it to -1 for the whole vocabulary",
            )
    for held_out in config.evaluation.sets:
        if held_out.sampling.temperature == 0 and held_out.samples_per_prompt > 1:
            yield Problem(
                f"evaluation.sets.{held_out.name}.samples_per_prompt",
                held_out.samples_per_prompt,
                "greedy samples of one prompt are all the same",
                "set it to 1, or the set's sampling.temperature above 0",
            )


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    o, s = config.trainer.optimizer, config.trainer.schedule
    for number, beta in enumerate(o.betas):
        if not 0 <= beta < 1:
            yield Problem(
                f"trainer.optimizer.betas.{number}", beta, "a decay rate lies in [0, 1)", "use 0.9 and 0.98"
            )
    if s.min_lr > o.lr:
        yield Problem(
            "trainer.schedule.min_lr",
            s.min_lr,
            f"it is above the peak, trainer.optimizer.lr = {o.lr:g}",
            "lower it, or raise the peak",
        )
    elif config.algorithm.advantage == "gae" and s.min_lr > config.algorithm.critic.lr:
        yield Problem(
            "trainer.schedule.min_lr",
            s.min_lr,
            f"it is above the critic's peak, algorithm.critic.lr = {config.algorithm.critic.lr:g}",
            "lower it, or raise the peak",
        )
    steps = s.decay_steps or config.run.iterations * max(1, config.steps_per_iteration)
    if s.kind != "constant" and s.warmup_steps >= steps:
        yield Problem(
            "trainer.schedule.warmup_steps",
            s.warmup_steps,
            f"the warm-up is not over when the decay ends, after {steps} steps",
            f"set it below {steps}",
        )


def _supervised(config: RunConfig) -> Iterator[Problem]:
    if config.algorithm.loss != "sft":
        return
    if config.rollout.samples_per_prompt != 1:
        yield Problem(
            "rollout.samples_per_prompt",
            config.rollout.samples_per_prompt,
            "algorithm.loss=sft learns the one reference answer of a prompt",
            "set it to 1",
        )
    for source in config.data.sources:
        if source.label_key is None:
            yield Problem(
                f"data.sources.{source.name}.label_key",
                None,
                "algorithm.loss=sft learns the reference answer, which no column is said to hold",
                "name the column",
            )


def _names(config: RunConfig) -> Iterator[Problem]:
    lists: dict[str, Sequence[Source | EvalSet]] = {
        "data.sources": config.data.sources,
        "evaluation.sets": config.evaluation.sets,
    }
    for field, items in lists.items():
        names = [item.name for item in items]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            where = [number for number, other in enumerate(names) if other == name]
            yield Problem(
                f"{field}.{where[-1]}.name",
                name,
                f"item {where[0]} has the same name, and metrics and lineage tell them apart by it",
                "give each its own name",
            )


def _intervals(config: RunConfig) -> Iterator[Problem]:
    c = config.checkpoint
    if c.keep_every and c.keep_every < config.run.iterations < lcm(c.every, c.keep_every):
        yield Problem(
            "checkpoint.keep_every",
            c.keep_every,
            f"no checkpoint of the run's {config.run.iterations} iterations, one every {c.every}, divides by it",
            f"set it to a multiple of checkpoint.every, such as {c.every}",
        )


def _embedded_possible(config: RunConfig) -> bool:
    return config.engines.kind in ("auto", "embedded") and config.algorithm.loss != "sft"


def _places(config: RunConfig) -> Iterator[Problem]:
    for field, place in (("storage.root", config.storage.root), ("sync.directory", config.sync.directory)):
        if place and place.startswith("memory://"):
            yield Problem(
                field,
                place,
                "the memory of one process is not seen by trainer and engines",
                "give a folder, s3:// or gs://",
            )
    files = [(f"data.sources.{s.name}.path", s.path) for s in config.data.sources]
    files += [(f"evaluation.sets.{s.name}.path", s.path) for s in config.evaluation.sets]
    for field, path in files:
        if not path.endswith((".jsonl", ".json", ".parquet")):
            yield Problem(
                field, path, "the format is not known by its ending", "give a .jsonl, .json or .parquet file"
            )
    if config.tracking.uri is not None:
        yield from _tracking(config.tracking.uri)


def _tracking(uri: str) -> Iterator[Problem]:
    known = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
    head, found, rest = uri.partition("://")
    if not uri.strip():
        yield Problem(
            "tracking.uri", uri, "it is empty", "leave it out for a SQLite file, or give http://host:port"
        )
    elif not found and uri != "databricks":
        yield Problem(
            "tracking.uri",
            uri,
            "it is no URI",
            "write sqlite:///path/of/file.db or http://host:port, or leave it out",
        )
    elif found and head.partition("+")[0] not in known:
        yield Problem("tracking.uri", uri, f"MLflow knows no {head}://", f"use one of {', '.join(known)}")
    elif head == "sqlite" and (not rest.startswith("/") or not rest.strip("/")):
        yield Problem("tracking.uri", uri, "it names no file", "write sqlite:///path/of/file.db")
    elif head in ("http", "https") and not _host(uri):
        yield Problem("tracking.uri", uri, "it names no host", "write http://host:port")
    elif urlsplit(uri).password:
        yield Problem(
            "tracking.uri",
            uri.replace(urlsplit(uri).password or "", "***"),
            "a configuration is stored with the run, and a password must not be",
            "leave it out; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or PGPASSWORD",
        )


def _host(uri: str) -> str | None:
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname


def _passthrough(config: RunConfig) -> Iterator[Problem]:
    megatron, sglang, router = config.trainer.megatron, config.engines.sglang, config.engines.router
    yield from _options("trainer.megatron", megatron, (), MEGATRON_REFUSED, MEGATRON_ELSEWHERE)
    yield from _options("engines.sglang", sglang, SGLANG_OWNED, SGLANG_REFUSED, SGLANG_ELSEWHERE)
    if sglang.get("dp_size", 1) != 1 and not sglang.get("enable_dp_attention"):
        yield Problem(
            "engines.sglang.dp_size",
            sglang["dp_size"],
            "all GPUs of an engine (engines.gpus) hold one copy of the model, and none is left for another",
            "remove it and raise engines.count, or set engines.sglang.enable_dp_attention=true",
        )
    if router:
        yield from _options("engines.router.options", router.options, ROUTER_OWNED, ROUTER_REFUSED, {})


def _options(
    place: str,
    options: Mapping[str, Any],
    owned: Sequence[str],
    refused: Mapping[str, str],
    elsewhere: Mapping[str, str],
) -> Iterator[Problem]:
    """What may not be passed through to upstream: millrace's own, what it refuses for a reason, and what other fields say."""
    for name, value in options.items():
        field = f"{place}.{name}"
        if name in owned:
            yield Problem(field, value, "millrace sets it itself", "remove it")
        elif name in refused:
            shown = "***" if name in SECRETS else value
            yield Problem(field, shown, f"not allowed: {refused[name]}", "remove it")
        elif name in elsewhere:
            yield Problem(
                field, value, f"it follows from {elsewhere[name]}", "remove it and set that instead"
            )
