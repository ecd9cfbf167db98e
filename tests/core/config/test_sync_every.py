"""`pipeline.sync_every`: which weights generate which iteration, and what it does not go with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.core.accounts.staleness import Ahead, admissible
from millrace.core.config.rules import problems
from millrace.tasks.context import IterationContext
from tests.core.config.test_rules import config

SECOND = ["pipeline.sync_every=2", "checkpoint.every=2", "algorithm.correction.kind=truncate"]
REFUSED: dict[str, tuple[list[str], str]] = {
    "an odd end": (["run.iterations=9"], "run.iterations"),
    "checkpoints between syncs": (["checkpoint.every=3"], "checkpoint.every"),
    "a checkpoint each iteration": (["checkpoint.every=1"], "checkpoint.every"),
    "evaluations between syncs": (["evaluation.every=5"], "evaluation.every"),
    "shared GPUs": (["placement.colocate=true"], "pipeline.sync_every"),
    "early passes": (["pipeline.eager=true"], "pipeline.sync_every"),
    "a buffer": (["rollout.buffer={max_age: 4}"], "pipeline.sync_every"),
    "no engines": (
        ["algorithm.loss=sft", "rollout.samples_per_prompt=1", "algorithm.correction.kind=none"],
        "pipeline.sync_every",
    ),
    "no weights of older tokens": (["algorithm.correction.kind=none"], "algorithm.correction.kind"),
    "a bound that is too low": (["pipeline.max_staleness=0"], "pipeline.max_staleness"),
    "a bound without the iterations ahead": (
        ["pipeline={sync_every: 2, ahead: 1, max_staleness: 1}"],
        "pipeline.max_staleness",
    ),
    "nothing young enough": (["algorithm.correction.max_token_age=0"], "algorithm.correction.max_token_age"),
}
ACCEPTED = [
    [],
    ["pipeline.max_staleness=3"],
    ["pipeline={sync_every: 2, ahead: 1}"],
    ["pipeline={sync_every: 2, ahead: 1, on_update: finish}"],
    ["pipeline={sync_every: 2, select: finish, max_staleness: 2}"],
    ["pipeline={sync_every: 2, ahead: 1, select: finish, max_staleness: 3}"],
    ["sync=disk"],
    ["sync=broadcast"],
    ["rollout.session.function=a:b", "rollout.session.max_tokens=100"],
    ["trainer.passes=2"],
    ["checkpoint.every=4", "evaluation.every=2"],
    ["evaluation.sets=[]", "evaluation.every=5"],
]


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_go_with_is_refused_by_name(name: str) -> None:
    overrides, field = REFUSED[name]
    found = {problem.field: problem for problem in problems(config(*SECOND, *overrides))}
    assert field in found
    assert found[field].remedy


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_what_it_goes_with_is_accepted(overrides: list[str]) -> None:
    assert problems(config(*SECOND, *overrides)) == []


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("on_update", ["finish", "resend"])
def test_iterations_are_generated_by_what_was_sent_and_no_token_is_too_old(
    every: int, ahead: int, steps: int, on_update: str
) -> None:
    """Against a run that is played: what engines were sent when an iteration opens, and when it is trained."""
    made = config(
        f"pipeline={{sync_every: {every}, ahead: {ahead}, on_update: {on_update}}}",
        f"trainer.global_batch={32 // steps}",
    )
    sent, after = 0, [0]  # after[i]: what engines serve once i iterations are trained
    for done in range(1, 13):
        sent = done * steps if done % every == 0 else sent
        after.append(sent)
    runtime: Any = SimpleNamespace(
        prompts=SimpleNamespace(ahead=Ahead(((0, ahead),))),
        run_folder=SimpleNamespace(iteration=lambda _: None),
    )
    for index in range(12):
        ctx = cast(Any, object.__new__(IterationContext))
        ctx.config, ctx.index, ctx.runtime = made, index, runtime
        opens = after[max(0, index - ahead)]
        newest = opens if on_update == "finish" else after[index]
        assert (ctx.versions.oldest, ctx.versions.newest) == (opens, newest)
        assert admissible(ctx.versions.oldest, index, made.pipeline.staleness, steps)
        assert ctx.sends == (after[index + 1] == (index + 1) * steps)
    tight = made.pipeline.staleness - 1
    oldest = max(index * steps - after[max(0, index - ahead)] for index in range(12))
    assert tight < 0 or oldest > tight * steps
