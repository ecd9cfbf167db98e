"""Every limit that ends a run: its message names the most frequent reason, how often it was, an example, the field and a remedy."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.connectors.trainers.refusals import refuse_gap
from millrace.core.config import RunConfig
from millrace.core.config.reading.findings import all_fields
from millrace.core.contracts.failures import Failures, RestartBudget
from millrace.core.contracts.rows.prompts import Quarantined
from millrace.core.contracts.sample import ScoredSample
from millrace.core.errors import MillraceError
from millrace.core.hooks.group_filters import Judgement
from millrace.core.logprob_gap import Cause
from millrace.tasks.batching.judged_groups import _budget as filter_budget
from millrace.tasks.context import IterationContext
from millrace.tasks.data.rows import too_many_unusable
from millrace.tasks.filter import _keep
from millrace.tasks.reward import reward_budget
from millrace.tasks.rollout import sample_generator
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.scoring.scored_group import ScoredGroup

LIMIT = re.compile(
    r"max_(?!truncated)\w*share|restarts|attempts|retries|(?<!p)refill|timeout|wait_s|max_\w*gap|tries|budget"
)
REASONS = ("no answer from '10.0.0.1'", "KeyError: 'a'", "no answer from '10.0.0.2'")  # of two kinds


def failed_rewards(ctx: IterationContext) -> None:
    budget = reward_budget(ctx)
    for number, reason in enumerate(REASONS):
        budget.add(reason, f"s{number}")
    budget.check()


def failed_filters(ctx: IterationContext) -> None:
    budget = filter_budget(ctx)
    for number, reason in enumerate(REASONS):
        budget.add(reason, f"s{number}")
    budget.check()


def failed_rollouts(ctx: IterationContext) -> None:
    rows = [
        {"status": "failed", "reason": reason, "sample_id": f"s{number}"}
        for number, reason in enumerate(REASONS)
    ]
    sample_generator(ctx, rows)._budget.check()


def failed_engines(_: IterationContext) -> None:
    budget = RestartBudget(2, lambda: Path("logs"))
    for number, reason in enumerate(REASONS):
        budget.count(f"engine-{number}", reason)


def dropped_groups(ctx: IterationContext) -> None:
    groups = [ScoredGroup(f"s{number}", "p", number) for number in range(3)]
    for group, reason in zip(groups, REASONS, strict=True):
        group.judgement = Judgement(False, reason, False)
    unscored = ScoredSample(
        sample_id="s9",
        group_id="s0",
        reward=None,
        reward_parts=[],
        scoring="failed",
        reason="OSError: judge",
        scoring_s=0,
    )
    groups[0].scores["s9"] = unscored
    _keep(ctx, groups, 2)


def unusable_rows(_: IterationContext) -> None:
    bad = [Quarantined("sums", number, reason, "text") for number, reason in enumerate(REASONS)]
    raise too_many_unusable("sums", bad, len(bad), len(bad) + 1, 0.5)


BUDGETS: dict[str, tuple[Callable[[IterationContext], None], str, str]] = {  # with its example and remedy
    "reward.max_failed_share": (failed_rewards, "sample s0", "those samples are scored again"),
    "rollout.max_failed_share": (failed_rollouts, "sample s0", "raise the share"),
    "filter.max_failed_share": (failed_filters, "group s0", "groups are judged again"),
    "engines.restarts": (
        failed_engines,
        "engine-0, whose log is logs/engine-0.log",
        "raise engines.restarts",
    ),
    "filter.refill_factor": (dropped_groups, "group s0", "set filter.when_insufficient=keep"),
    "data.max_quarantined_share": (unusable_rows, "row 0: 'text'", "raise the share"),
}
ONE_CAUSE = {  # what has one cause each time, and where the message is that names the field
    "rollout.attempts": "connectors/engines/dispatcher.py",
    "rollout.progress_timeout_s": "connectors/engines/watched.py",
    "rollout.session.timeout_s": "connectors/user_code/session_pool.py",
    "rollout.session.rollout_timeout_s": "connectors/user_code/session_pool.py",
    "reward.timeout_s": "tasks/runtime/scoring.py",
    "run.progress_timeout_s": "core/waits.py",
    "engines.start_timeout_s": "connectors/engines/process.py",
    "placement.wait_s": "connectors/ray/placement.py",
    "sync.max_logprob_gap": "connectors/trainers/refusals.py",
    "sync.max_prompt_gap": "tasks/weight_check.py",
}


SAID_BY_SERVERS = {  # tests/connectors/rewards/test_served_teacher.py: the message names the section and the setting
    "algorithm.teacher_server.timeout_s",
    "algorithm.teacher_server.attempts",
}


@pytest.fixture
def ctx(make_config: Callable[..., RunConfig]) -> IterationContext:
    config = make_config(filter={"when_insufficient": "stop"})
    return IterationContext(Runtime(config), 1)


def test_every_limit_of_the_configuration_has_a_row() -> None:
    limits = {path for path in all_fields(RunConfig) if LIMIT.search(path.rpartition(".")[2])}
    assert limits == BUDGETS.keys() | ONE_CAUSE.keys() | SAID_BY_SERVERS


@pytest.mark.parametrize("field", BUDGETS)
def test_a_spent_budget_names_reason_count_example_field_and_remedy(
    ctx: IterationContext, field: str
) -> None:
    spend, example, remedy = BUDGETS[field]
    with pytest.raises(MillraceError) as caught:
        spend(ctx)
    said = str(caught.value)
    assert f"most often: no answer from '10.0.0.1' (2 of 3, such as {example}" in said.replace("that of ", "")
    assert field in said
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("field", ONE_CAUSE)
def test_a_limit_with_one_cause_is_named_by_its_message(field: str) -> None:
    tree = ast.parse((Path(__file__).parents[2] / ONE_CAUSE[field]).read_text())
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documented
    ]
    assert any(field in text for text in texts if isinstance(text, str))


def test_the_page_on_debugging_quotes_what_is_said(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(rollout={"prompts": 4, "samples_per_prompt": 8})
    rewards = reward_budget(IterationContext(Runtime(config), 0))
    engines = RestartBudget(3, lambda: Path("runs/mine/logs"))

    def scored() -> None:
        for number in range(1, 5):
            rewards.add("KeyError: 'points' in my_rewards.py, line 4", f"g3-{number:04d}")
        rewards.check()

    def died() -> None:
        for _ in range(4):
            engines.count("engine-0", "its process ended")

    said = []
    for spend in (
        lambda: refuse_gap("bfloat16", 3, 3, 0.21, 4.1, 0.087, 0.029, Cause("temperature", "", "")),
        died,
        scored,
    ):
        with pytest.raises(MillraceError) as caught:
            spend()
        said.append(str(caught.value))
    page = (Path(__file__).parents[2] / "docs" / "looking.md").read_text()
    quotes = [text.strip() for kind, text in re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL) if not kind]
    assert [text.startswith(quote) for text, quote in zip(said, quotes, strict=True)] == [True] * 3, said


def test_groups_that_lack_scores_name_why_the_scores_are_missing(ctx: IterationContext) -> None:
    with pytest.raises(
        MillraceError, match=r"not scored most often: OSError: judge \(1 of 1, such as sample s9\)"
    ):
        dropped_groups(ctx)


def test_reasons_that_differ_in_quoted_text_and_numbers_are_one_kind_and_a_long_one_is_cut() -> None:
    failures = Failures()
    for number in range(3):
        failures.add(f"ValueError: cannot read '{number}'\nat {number}", f"s{number}")
    failures.add("x" * 1000, "s9")
    assert failures.most_frequent() == "ValueError: cannot read '0' at 0 (3 of 4, such as s0)"
    failures = Failures()
    failures.add("x" * 1000, "s9")
    assert len(failures.most_frequent()) < 400
