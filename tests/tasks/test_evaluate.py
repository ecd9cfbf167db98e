"""Evaluation over a real run folder and reward: its rows and figures, and what failing engines do to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.connectors.huggingface.answer_ends import AnswerEnds
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.user_code.pool import Outcome
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import derived_seed
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.core.contracts.sample import Scorable
from millrace.core.errors import BudgetError
from millrace.core.evaluation import evaluation_metrics
from millrace.core.hooks.reward_selection import Selected
from millrace.core.rewards.scoring import score_sample
from millrace.tasks.context import IterationContext
from millrace.tasks.data.prompt_dataset import PromptSet
from millrace.tasks.data.rows import UsablePrompt
from millrace.tasks.evaluate import evaluate, evaluate_before, is_evaluated_by
from millrace.tasks.runtime.scoring import Scoring
from tests.support.scripted_engines import TEXT_ALONE, ScriptedEngines

MakeConfig = Callable[..., RunConfig]
ROWS = [PromptRow("sums", n, f"p{n}", f"{n}+1=", label) for n, label in enumerate(["2", "x", "2", "2", "2"])]


UNREADABLE = {
    '"0+1="': Outcome("timed_out", reason="no answer within 30 s"),
    '"2+1="': Outcome("failed", reason="ValueError: no"),
    '"3+1="': Outcome("died", reason="the worker process died of signal 9 (Killed)"),
}


def context(
    make_config: MakeConfig, engines: ScriptedEngines, unreadable: Sequence[str] = ()
) -> IterationContext:
    """The second iteration of a run with a held-out set of five prompts, two samples each.

    unreadable: prompts, as stored, whose answers cannot be scored, as UNREADABLE says.
    """
    held_out = {"name": "sums", "path": "held_out.jsonl", "samples_per_prompt": 2}
    config = make_config(evaluation={"sets": [held_out]})

    async def ready(version: int) -> ScriptedEngines:
        return engines

    scoring = Scoring(config)

    async def score_unless_unreadable(selected: Selected, sample: Scorable) -> Outcome:
        if sample["prompt"] in unreadable:
            return UNREADABLE[sample["prompt"]]
        function = selected.function
        return Outcome("done", score_sample(function.function, function.options, sample, selected.field))

    runtime: Any = SimpleNamespace(
        config=config,
        run_folder=RunFolder(config.storage.root, config.run.name),
        memory=SimpleNamespace(for_engines=ready),
        places=lambda share: None,
        scoring=SimpleNamespace(
            score=score_unless_unreadable, of_sets=scoring.of_sets, selected=scoring.selected
        ),
        prompts=SimpleNamespace(
            **TEXT_ALONE,
            tokenizer=SimpleNamespace(ends=AnswerEnds()),
            held_out=lambda held_out: PromptSet(
                held_out, [UsablePrompt(row, [n]) for n, row in enumerate(ROWS)]
            ),
        ),
    )
    return IterationContext(runtime, 1)


def rows(ctx: IterationContext, done: int) -> list[dict[str, Any]]:
    stored: list[dict[str, Any]] = ctx.run_folder.store.read_table(
        f"eval/sums/{done:06d}.parquet", "evaluations"
    ).to_pylist()
    return stored


async def test_every_prompt_is_sampled_and_scored_in_order(make_config: MakeConfig) -> None:
    engines = ScriptedEngines()
    ctx = context(make_config, engines)
    record = await evaluate.fn(ctx)
    assert (record["version"], record["done"]) == (2, 2)
    figures = record["sets"]["sums"]
    assert (figures["samples"], figures["not_scored"], figures["failed"]) == (10, 0, 0)
    assert figures["reward_mean"] == pytest.approx(0.8)
    stored = rows(ctx, 2)
    assert [(row["prompt_id"], row["index"]) for row in stored] == [
        (f"p{n}", i) for n in range(5) for i in (0, 1)
    ]
    assert stored[2] == {
        "set": "sums",
        "prompt_id": "p1",
        "index": 0,
        "prompt": '"1+1="',
        "label": '"x"',
        "response": "2 .",
        "response_length": 2,
        "status": "completed",
        "reward": 0.0,
        "scoring": "scored",
        "version": 2,
        "subset": None,
        "reason": None,
        "loss": None,
        "loss_tokens": None,
        "reward_texts": None,
        "answer": None,
    }
    rid, tokens, params, session = engines.requests[3]
    assert (rid, tokens, session) == ("eval-2-p1-1", [1], None)
    assert params["sampling_seed"] == derived_seed(0, "evaluate", "sums", "p1", 1)


async def test_the_untrained_policy_is_kept_under_no_iteration_trained(make_config: MakeConfig) -> None:
    ctx = context(make_config, ScriptedEngines())
    ctx.index = 0
    record = await evaluate_before.fn(ctx)
    assert (record["version"], record["done"]) == (0, 0)
    assert len(rows(ctx, 0)) == 10


async def test_an_evaluation_says_how_far_the_trainer_has_gone_meanwhile(make_config: MakeConfig) -> None:
    engines = ScriptedEngines()
    ctx = context(make_config, engines)
    assert (await evaluate_before.fn(ctx))["lag"] == 0
    assert engines.priorities == {ctx.index}, "as its rollouts, and before those of later iterations"
    for index in (1, 2, 4):  # the iteration trains while its weights are evaluated, and so does the one after
        ctx.run_folder.iteration(index).write_sealed("results/train_step.json", {"result": "{}"})
    record = await evaluate_before.fn(ctx)
    assert (record["done"], record["version"], record["lag"]) == (1, 1, 2)
    assert evaluation_metrics(record)["eval/lag"] == 2


async def test_an_iteration_does_not_evaluate_what_the_one_before_has(make_config: MakeConfig) -> None:
    """As where a run that waited for its evaluations goes on with evaluation.background."""
    ctx = context(make_config, ScriptedEngines())
    assert not is_evaluated_by(ctx)
    record = {"version": 1, "done": 1, "sets": {}, "seconds": 0.0}
    ctx.run_folder.iteration(0).write_sealed("results/evaluate.json", {"result": json.dumps(record)})
    assert is_evaluated_by(ctx)
    ctx.index = 0
    assert not is_evaluated_by(ctx)


async def test_a_sample_that_fails_within_the_budget_is_counted_and_is_no_zero(
    make_config: MakeConfig,
) -> None:
    ctx = context(make_config, ScriptedEngines(lambda rid: rid.endswith("p1-1")))
    figures = (await evaluate.fn(ctx))["sets"]["sums"]
    assert (figures["failed"], figures["not_scored"], figures["unscored"]) == (1, 1, 0)
    assert figures["reward_mean"] == pytest.approx(8 / 9)
    failed = rows(ctx, 2)[3]
    assert (failed["status"], failed["scoring"], failed["reward"]) == ("failed", "skipped", None)
    assert (failed["response"], failed["response_length"]) == ("", 0)


async def test_an_answer_that_could_not_be_scored_is_wrong_and_counted(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    engines = ScriptedEngines(lambda rid: rid.endswith("p1-1"))
    figures = (await evaluate.fn(context(make_config, engines, list(UNREADABLE))))["sets"]["sums"]
    assert (figures["unscored"], figures["failed"], figures["not_scored"]) == (6, 1, 7)
    assert (
        "evaluation of sums: 6 of 10 answers could not be scored and count as wrong; most often: "
        in caplog.text
    )
    assert figures["reward_mean"] == pytest.approx(2 / 9)  # p4's two are right; p1's lost sample is none


async def test_more_failures_than_the_budget_stop_the_run_and_name_the_set(make_config: MakeConfig) -> None:
    """Before evaluation had a budget, one lost sample ended a run that could have gone on."""
    ctx = context(make_config, ScriptedEngines(lambda rid: rid.endswith("-1")))
    with pytest.raises(
        BudgetError, match="2 samples failed to generate, more than rollout.max_failed_share"
    ) as caught:
        await evaluate.fn(ctx)
    assert caught.value.where == "evaluation of sums after 2 iterations"
    assert ctx.run_folder.store.list("eval") == []
