"""Rules of `pipeline`."""

from collections.abc import Iterable, Iterator
from operator import attrgetter

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
        yield config.problem(
            "pipeline.max_staleness",
            f"with pipeline.ahead={p.ahead} and sync_every={p.sync_every} tokens are up to {p.oldest} versions old when they are "
            "trained",
            f"set it to at least {p.oldest}, or lower one of the two",
        )
    if (p.oldest or p.deferrals) and not config.algorithm.supervised:
        field = "ahead" if p.ahead else "sync_every" if p.oldest else "max_staleness"
        yield from unweighed(config, f"with pipeline.{field} tokens are made by older weights")
    if p.min_ess is not None:
        yield from _min_ess(config)
    refused = config.rollout.session or config.filter.oversample or config.rollout.buffer
    if p.select == "finish" and p.max_staleness is None and not (refused or config.algorithm.supervised):
        yield config.problem(
            "pipeline.max_staleness",
            f"it stands for {p.oldest} here, so no group may be deferred: with pipeline.select=finish unfinished groups would be dropped, and long answers trained less often than they are drawn",
            f"set it to {p.oldest + 1}, or to {p.oldest} to drop them nevertheless",
        )
    if p.select == "finish" and config.rollout.session:
        yield config.problem(
            "pipeline.select",
            "rollouts of several turns (rollout.session) cannot be deferred amid a turn",
            "set it to draw",
        )
    if config.filter.oversample:
        yield from _oversample(config)
    if config.algorithm.supervised and (p.ahead or p.select == "finish"):
        field = "pipeline.ahead" if p.ahead else "pipeline.select"
        yield config.problem(field, "algorithm.loss=sft generates nothing", "leave the section out")
    if config.rollout.buffer and (p.ahead or p.select == "finish"):
        yield config.problem(
            "rollout.buffer",
            "which groups it holds would depend on time where iterations overlap or groups are deferred",
            "leave it out, or set pipeline.ahead=0 and pipeline.select=draw",
        )
    if p.ahead and config.placement.colocate:
        yield config.problem(
            "pipeline.ahead",
            "on shared GPUs (placement.colocate) the engines sleep while the trainer works",
            "set placement.colocate=false and give the engines separate GPUs, or set it to 0: "
            "pipeline.select=finish with max_staleness=1 shortens the wait for long answers there",
        )


WITHOUT_TRAINER = {
    "algorithm.loss": "it learns reference answers and generates nothing",
    "pipeline.ahead": "no iteration trains that another could be ahead of",
    "pipeline.eager": "there are no passes to make early",
    "pipeline.select": "the next iteration would not train what is deferred",
    "pipeline.sync_every": "no weights are sent",
    "placement.colocate": "no trainer shares the engines' GPUs",
    "rollout.buffer": "it holds trained groups",
    "sync.max_prompt_gap": "there is no trainer to compare engines with",
    "checkpoint.keep_best": "no checkpoint is saved",
    "trainer.store_logprobs": "no trainer computes them",
    "engines.kind": "they are loaded with model.path",
}
"""Why settings that need a trainer are refused with pipeline.rollouts_only."""
WITHOUT_ENGINES = {
    "algorithm.loss": "the samples that are trained on are rollouts",
    "pipeline.rollouts_only": "nothing is generated",
    "pipeline.ahead": "no iteration generates that could be ahead",
    "pipeline.eager": "all groups of an iteration are there at once",
    "pipeline.select": "no group is under way that could be deferred",
    "pipeline.sync_every": "no weights are sent",
    "placement.colocate": "no engines share the trainer's GPUs",
    "rollout.buffer": "each iteration trains what is stored",
    "sync.max_prompt_gap": "there are no engines to compare the trainer with",
    "engines.kind": "no engine is asked",
}
"""Why settings that need engines, or decide what is generated, are refused with pipeline.rollouts_from."""


def _rollouts_only(config: RunConfig) -> Iterator[Problem]:
    if config.pipeline.rollouts_only:
        for field in _set_among(config, WITHOUT_TRAINER):
            reason = f"with pipeline.rollouts_only {WITHOUT_TRAINER[field]}"
            yield config.problem(field, reason, "leave it out, or set rollouts_only to false")


def _rollouts_from(config: RunConfig) -> Iterator[Problem]:
    mode = "with pipeline.rollouts_from"
    if config.pipeline.rollouts_from is None:
        return
    if config.pipeline.rollouts_from == config.run.name:
        reason = f"{mode} the run would read its own rollouts"
        yield config.problem("pipeline.rollouts_from", reason, "give the new run another run.name")
    for field in _set_among(config, WITHOUT_ENGINES):
        reason = f"{mode} {WITHOUT_ENGINES[field]}"
        yield config.problem(field, reason, "leave it out, or leave rollouts_from out")
    if config.evaluation.sets:
        yield Problem(
            "evaluation.sets",
            "set",
            f"{mode} no engine answers them",
            "set it to [], and evaluate an export: `millrace eval FOLDER --config CONFIG`",
        )


def _set_among(config: RunConfig, fields: Iterable[str]) -> Iterator[str]:
    """The fields that are set to something that needs both a trainer and engines."""
    p = config.pipeline
    is_set = {
        "algorithm.loss": config.algorithm.supervised,
        "pipeline.rollouts_only": p.rollouts_only,
        "pipeline.ahead": p.ahead > 0,
        "pipeline.eager": p.eager,
        "pipeline.select": p.select == "finish",
        "pipeline.sync_every": p.sync_every > 1,
        "placement.colocate": config.placement.colocate,
        "rollout.buffer": config.rollout.buffer is not None,
        "sync.max_prompt_gap": config.sync.max_prompt_gap is not None,
        "checkpoint.keep_best": config.checkpoint.keep_best is not None,
        "trainer.store_logprobs": config.trainer.store_logprobs,
        "engines.kind": not config.engines.started,
    }
    return (field for field in fields if is_set[field])


def _sync_every(config: RunConfig) -> Iterator[Problem]:
    """Settings that between two syncs need the newest weights in engines, or could not restore the last sync's."""
    p, every = config.pipeline, config.pipeline.sync_every
    if every == 1:
        return
    multiples = {
        "run.iterations": "the last iteration would leave engines behind the trained weights",
        "checkpoint.every": "engines that are lost between two syncs get the weights of the last one again, which a newer checkpoint does not hold",
    }
    if config.evaluation.sets and not config.algorithm.supervised:
        multiples["evaluation.every"] = (
            "engines evaluate the trained weights, which they have only after a sync"
        )
    for field, why in multiples.items():
        value: int = attrgetter(field)(config)
        if value % every:
            yield config.problem(
                field,
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
            yield config.problem("pipeline.sync_every", why, f"set it to 1, or leave {other} out")


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
    yield config.problem("filter.oversample", why, remedy)


def _min_ess(config: RunConfig) -> Iterator[Problem]:
    """A bound on the effective sample size that could lower nothing."""
    p, c = config.pipeline, config.algorithm.correction
    bounds = (c.veto, c.opsm_delta, c.max_token_age)
    weighs = c.kind != "none" or any(bound is not None for bound in bounds)
    if not p.ahead:
        yield config.problem(
            "pipeline.min_ess",
            "it lowers pipeline.ahead, which is 0",
            "leave it out, or raise pipeline.ahead",
        )
    elif not weighs or config.algorithm.loss.kind == "function":
        yield config.problem(
            "pipeline.min_ess",
            "the effective sample size is that of the weights of algorithm.correction, and no loss is weighed by them",
            "leave it out, or set algorithm.correction.kind with a loss of algorithm.loss.kind",
        )
