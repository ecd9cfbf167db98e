"""Which modes of running ahead and of choosing groups go together: all of the matrix do, and each clash names one field."""

from __future__ import annotations

from itertools import product

import pytest

from tests.core.config.test_rules import fields

WEIGHED = "algorithm.correction.kind=truncate"
AHEAD, FINISH = "pipeline.ahead=1", "pipeline.select=finish"
SESSION = "rollout.session={function: 'm:f', max_tokens: 64}"
BUFFER = "rollout.buffer.share=0.25"
SUPERVISED = ["algorithm.loss=sft", "rollout.samples_per_prompt=1"]
BOUNDS = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (3, 8))


@pytest.mark.parametrize("on_update", ["finish", "resend", "retract", "keep"])
@pytest.mark.parametrize(("bounds", "select"), list(product(BOUNDS, ["draw", "finish"])))
def test_these_modes_agree(bounds: tuple[int, int], select: str, on_update: str) -> None:
    ahead, staleness = bounds
    mode = [f"pipeline.ahead={ahead}", f"pipeline.max_staleness={staleness}", f"pipeline.select={select}"]
    mode += ["pipeline.reserve=1", f"pipeline.on_update={on_update}", WEIGHED]
    assert fields(*mode) == []


@pytest.mark.parametrize("ahead", [1, 2, 8])
def test_a_bound_on_age_is_at_least_what_running_ahead_makes(ahead: int) -> None:
    mode = [f"pipeline.ahead={ahead}", WEIGHED]
    assert fields(*mode) == fields(*mode, f"pipeline.max_staleness={ahead}") == []
    assert fields(*mode, f"pipeline.max_staleness={ahead - 1}") == ["pipeline.max_staleness"]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ([FINISH, SESSION], "pipeline.select"),
        ([FINISH, "filter.oversample=0.5"], "filter.oversample"),
        ([SESSION, "filter.oversample=0.5"], "filter.oversample"),
        ([AHEAD, BUFFER, WEIGHED], "rollout.buffer"),
        ([FINISH, BUFFER, WEIGHED], "rollout.buffer"),
        (
            [AHEAD, WEIGHED, "placement.colocate=true", "engines.kind=sglang", "trainer.device=cuda"],
            "pipeline.ahead",
        ),
        ([AHEAD], "algorithm.correction.kind"),
        ([FINISH, "pipeline.max_staleness=1"], "algorithm.correction.kind"),
        ([FINISH], "pipeline.max_staleness"),
        ([FINISH, AHEAD, WEIGHED], "pipeline.max_staleness"),
        ([*SUPERVISED, AHEAD], "pipeline.ahead"),
        ([*SUPERVISED, FINISH], "pipeline.select"),
        (["pipeline.min_ess=0.5", WEIGHED], "pipeline.min_ess"),
        ([AHEAD, "pipeline.min_ess=0.5", "algorithm.old_logprobs=rollout"], "pipeline.min_ess"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_these_clash_and_one_field_is_named(overrides: list[str], field: str) -> None:
    assert fields(*overrides) == [field]


def test_what_finish_forbids_draw_allows() -> None:
    for other in (SESSION, "filter.oversample=0.5", BUFFER):
        assert fields("pipeline.select=draw", other, WEIGHED) == []
    assert fields("pipeline.select=draw", AHEAD, SESSION, WEIGHED) == []
