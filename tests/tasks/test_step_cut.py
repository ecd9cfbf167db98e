"""Which step trains which sample: every step gets some, whatever could not be scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.core.config import RunConfig
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.sample import ScoredSample
from millrace.core.errors import BudgetError
from millrace.tasks.batching.kept_groups import KeptGroups
from millrace.tasks.context import IterationContext
from millrace.tasks.filter import _steps
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.scoring.scored_group import ScoredGroup

MakeConfig = Callable[..., RunConfig]


def cut(make_config: MakeConfig, global_batch: int, scored: list[bool]) -> list[int]:
    """The step of each scored sample, in drawing order, of two groups of four in the second iteration."""
    config = make_config(trainer={"global_batch": global_batch})
    groups = [ScoredGroup(f"g{number}", "p", number) for number in range(2)]
    ids = [(group.group_id, sample_id(group.group_id, index)) for group in groups for index in range(4)]
    scores = [
        ScoredSample(
            sample_id=sid,
            group_id=group,
            reward=1.0,
            reward_parts=[],
            scoring="scored",
            reason=None,
            scoring_s=0.0,
        )
        for (group, sid), kept in zip(ids, scored, strict=True)
        if kept
    ]
    kept = KeptGroups(groups, pa.table({}), scores)
    steps = _steps(IterationContext(Runtime(config), 1), kept)
    assert list(steps) == [score.sample_id for score in scores]
    return list(steps.values())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.booleans(), min_size=8, max_size=8))
def test_every_step_has_samples_in_drawing_order(
    make_config: MakeConfig, global_batch: int, scored: list[bool]
) -> None:
    first = 8 // global_batch
    due = list(range(first + 1, 2 * first + 1))
    if sum(scored) < len(due):
        with pytest.raises(BudgetError, match=rf"iteration 2: only {sum(scored)} samples were scored"):
            cut(make_config, global_batch, scored)
        return
    steps = cut(make_config, global_batch, scored)
    assert steps == sorted(steps)
    assert sorted(set(steps)) == due


def test_places_of_unscored_samples_stay_empty_while_every_step_has_others(make_config: MakeConfig) -> None:
    assert cut(make_config, 4, [True] * 8) == [3] * 4 + [4] * 4
    assert cut(make_config, 4, [True, False, False, True] + [True] * 4) == [3] * 2 + [4] * 4
    assert Counter(cut(make_config, 2, [True] * 6 + [False] * 2)) == {5: 2, 6: 1, 7: 2, 8: 1}
