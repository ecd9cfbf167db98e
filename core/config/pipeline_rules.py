"""Rules of `pipeline`."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.algorithm.rules import unweighed
from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """What cannot run ahead of the trainer, and bounds that contradict each other."""
    p = config.pipeline
    yield from _sync_every(config)
    yield from _rollouts_only(config)
    yield from _rollouts_from(config)
    if p.staleness < p.oldest:
        yield Problem(
            "pipeline.max_staleness",
            p.max_staleness,
            f"with pipeline.ahead={p.ahead} and sync_every={p.sync_every} tokens are up to {p.oldest} versions old when they are "
            "trained",
            f"set it to at least {p.oldest}, or lower one of the two",
        )
    if (p.oldest or p.deferrals) and not config.algorithm.supervised:
        field = "ahead" if p.ahead else "sync_every" if p.oldest else "max_staleness"
        field = f"pipeline.{field}"
        yield from unweighed(config.algorithm, f"with {field} tokens are made by older weights")
    if p.min_ess is not None:
        yield from _min_ess(config)
    refused = config.rollout.session or config.filter.oversample or config.rollout.buffer
    if p.select == "finish" and p.max_staleness is None and not (refused or config.algorithm.supervised):
        yield Problem(
            "pipeline.max_staleness",
            None,
            f"it stands for {p.oldest} here, so no group may be deferred: with pipeline.select=finish unfinished groups would be dropped, and long answers trained less often than they are drawn",
            f"set it to {p.oldest + 1}, or to {p.oldest} to drop them nevertheless",
        )
    if p.select == "finish" and config.rollout.session:
        yield Problem(
            "pipeline.select",
            "finish",
            "rollouts of several turns (rollout.session) cannot be deferred amid a turn",
            "set it to draw",
        )
    if config.filter.oversample:
        yield from _oversample(config)
    if config.algorithm.supervised and (p.ahead or p.select == "finish"):
        field = "pipeline.ahead" if p.ahead else "pipeline.select"
        yield Problem(
            field, p.ahead or p.select, "algorithm.loss=sft generates nothing", "leave the section out"
        )
    if config.rollout.buffer and (p.ahead or p.select == "finish"):
        yield Problem(
            "rollout.buffer",
            "set",
            "which groups it holds would depend on time where iterations overlap or groups are deferred",
            "leave it out, or set pipeline.ahead=0 and pipeline.select=draw",
        )
    if p.ahead and config.placement.colocate:
        yield Problem(
            "pipeline.ahead",
            p.ahead,
            "on shared GPUs (placement.colocate) the engines sleep while the trainer works",
            "set placement.colocate=false and give the engines separate GPUs, or set it to 0: "
            "pipeline.select=finish with max_staleness=1 shortens the wait for long answers there",
        )


def _rollouts_only(config: RunConfig) -> Iterator[Problem]:
    """Settings that need a trainer, in a run without one."""
    p, a = config.pipeline, config.algorithm
    if not p.rollouts_only:
        return
    needs = {
        "algorithm.loss": (a.supervised, "sft", "it learns reference answers and generates nothing"),
        "pipeline.ahead": (p.ahead > 0, p.ahead, "no iteration trains that another could be ahead of"),
        "pipeline.eager": (p.eager, True, "there are no passes to make early"),
        "pipeline.select": (
            p.select == "finish",
            p.select,
            "the next iteration would not train what is deferred",
        ),
        "pipeline.sync_every": (p.sync_every > 1, p.sync_every, "no weights are sent"),
        "placement.colocate": (config.placement.colocate, True, "no trainer shares the engines' GPUs"),
        "rollout.buffer": (config.rollout.buffer is not None, "set", "it holds trained groups"),
        "sync.max_prompt_gap": (
            config.sync.max_prompt_gap is not None,
            config.sync.max_prompt_gap,
            "there is no trainer to compare engines with",
        ),
        "checkpoint.keep_best": (
            config.checkpoint.keep_best is not None,
            config.checkpoint.keep_best,
            "no checkpoint is saved",
        ),
        "trainer.store_logprobs": (config.trainer.store_logprobs, True, "no trainer computes them"),
        "engines.kind": (not config.engines.started, config.engines.kind, "they are loaded with model.path"),
    }
    for field, (wrong, value, reason) in needs.items():
        if wrong:
            yield Problem(
                field,
                value,
                f"with pipeline.rollouts_only {reason}",
                "leave it out, or set rollouts_only to false",
            )


def _rollouts_from(config: RunConfig) -> Iterator[Problem]:
    """Settings that need engines, or decide what is generated, in a run that trains on another run's rollouts."""
    p = config.pipeline
    if p.rollouts_from is None:
        return
    needs = {
        "pipeline.rollouts_from": (
            p.rollouts_from == config.run.name,
            p.rollouts_from,
            "the run would read its own rollouts",
        ),
        "algorithm.loss": (
            config.algorithm.supervised,
            "sft",
            "the samples that are trained on are rollouts",
        ),
        "pipeline.rollouts_only": (p.rollouts_only, True, "nothing is generated"),
        "pipeline.ahead": (p.ahead > 0, p.ahead, "no iteration generates that could be ahead"),
        "pipeline.eager": (p.eager, True, "all groups of an iteration are there at once"),
        "pipeline.select": (p.select == "finish", p.select, "no group is under way that could be deferred"),
        "pipeline.sync_every": (p.sync_every > 1, p.sync_every, "no weights are sent"),
        "placement.colocate": (config.placement.colocate, True, "no engines share the trainer's GPUs"),
        "rollout.buffer": (config.rollout.buffer is not None, "set", "each iteration trains what is stored"),
        "sync.max_prompt_gap": (
            config.sync.max_prompt_gap is not None,
            config.sync.max_prompt_gap,
            "there are no engines to compare the trainer with",
        ),
        "evaluation.sets": (bool(config.evaluation.sets), "set", "no engine answers them"),
        "engines.kind": (not config.engines.started, config.engines.kind, "no engine is asked"),
    }
    remedies = {
        "pipeline.rollouts_from": "give the new run another run.name",
        "evaluation.sets": "set it to [], and evaluate an export: `millrace eval FOLDER --config CONFIG`",
    }
    for field, (wrong, value, reason) in needs.items():
        if wrong:
            remedy = remedies.get(field, "leave it out, or leave rollouts_from out")
            yield Problem(field, value, f"with pipeline.rollouts_from {reason}", remedy)


def _sync_every(config: RunConfig) -> Iterator[Problem]:
    """Settings that between two syncs need the newest weights in engines, or could not restore the last sync's."""
    p, every = config.pipeline, config.pipeline.sync_every
    if every == 1:
        return
    multiples = {
        "run.iterations": (
            config.run.iterations,
            "the last iteration would leave engines behind the trained weights",
        ),
        "checkpoint.every": (
            config.checkpoint.every,
            "engines that are lost between two syncs get the weights of the last one again, which a newer checkpoint does not hold",
        ),
    }
    if config.evaluation.sets and not config.algorithm.supervised:
        multiples["evaluation.every"] = (
            config.evaluation.every,
            "engines evaluate the trained weights, which they have only after a sync",
        )
    for field, (value, why) in multiples.items():
        if value % every:
            yield Problem(
                field,
                value,
                f"with pipeline.sync_every={every}, {why}",
                f"set it to {-(-value // every) * every}, or pipeline.sync_every to a divisor of {value}",
            )
    others = {
        "algorithm.loss=sft": (config.algorithm.supervised, "supervised training generates nothing"),
        "placement.colocate": (
            config.placement.colocate,
            "on shared GPUs engines lose their weights while the trainer works",
        ),
        "pipeline.eager": (p.eager, "passes are made early of what the weights that are trained generate"),
        "rollout.buffer": (
            config.rollout.buffer is not None,
            "rollout.buffer counts a group's age from its iteration's weights on",
        ),
    }
    for other, (given, why) in others.items():
        if given:
            yield Problem("pipeline.sync_every", every, why, f"set it to 1, or leave {other} out")


def _oversample(config: RunConfig) -> Iterator[Problem]:
    """filter.oversample with rollouts that cannot be ended, or beside pipeline.reserve."""
    if config.pipeline.select == "finish":
        why, remedy = (
            "with pipeline.select=finish it is pipeline.reserve that says how many groups begin",
            "leave it out, and set pipeline.reserve",
        )
    elif config.rollout.session:
        why, remedy = (
            "rollouts of several turns (rollout.session) cannot be ended amid a turn",
            "leave it out",
        )
    else:
        return
    yield Problem("filter.oversample", config.filter.oversample, why, remedy)


def _min_ess(config: RunConfig) -> Iterator[Problem]:
    """A bound on the effective sample size that could lower nothing."""
    p, c = config.pipeline, config.algorithm.correction
    bounds = (c.veto, c.opsm_delta, c.max_token_age)
    weighs = c.kind != "none" or any(bound is not None for bound in bounds)
    if not p.ahead:
        yield Problem(
            "pipeline.min_ess",
            p.min_ess,
            "it lowers pipeline.ahead, which is 0",
            "leave it out, or raise pipeline.ahead",
        )
    elif not weighs or config.algorithm.loss.kind == "function":
        yield Problem(
            "pipeline.min_ess",
            p.min_ess,
            "the effective sample size is that of the weights of algorithm.correction, and no loss is weighed by them",
            "leave it out, or set algorithm.correction.kind with a loss of algorithm.loss.kind",
        )
