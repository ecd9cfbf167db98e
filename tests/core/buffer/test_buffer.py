"""The buffer, over histories that hypothesis makes up: nothing too old, nothing too often, the same choice again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.core.accounts.buffer import HeldGroups, chosen, reach, spread
from millrace.core.accounts.history import GroupOutcome, IterationHistory
from millrace.core.accounts.ledger import Ledger
from millrace.core.config.rollout import Buffer as Settings
from millrace.core.contracts.sample import Verdict
from millrace.core.errors import ConfigError
from millrace.core.hooks.protocols import BufferedGroup

SOURCES = {"a": (1.0, 5), "b": (2.0, 7)}
VERDICTS: list[Verdict] = ["kept", "kept", "kept", "dropped", "returned"]
rewards_ = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
settings_ = st.builds(
    Settings,
    share=st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    max_age=st.integers(1, 7),
    max_uses=st.integers(2, 4),
    choose=st.sampled_from(["first_in_first_out", "prioritised", "stratified"]),
    strata=st.sampled_from(["source", "reward"]),
)


def again(history: list[IterationHistory]) -> list[IterationHistory]:
    """What a restarted process reads."""
    return [IterationHistory.model_validate_json(part.model_dump_json()) for part in history]


@settings(max_examples=60, deadline=None)
@given(
    settings_,
    st.lists(st.tuples(st.integers(2, 8), st.integers(0, 3)), max_size=9),
    st.integers(1, 3),
    st.data(),
)
def test_over_any_history_no_group_is_reused_too_old_or_too_often_and_a_restart_chooses_the_same(
    buffered: Settings, requests: list[tuple[int, int]], steps: int, data: Any
) -> None:
    """Also where no group names the last steps: later passes have none, nor has a step that trains reused groups alone."""
    buffer, ledger = HeldGroups(buffered.max_age, buffered.max_uses, steps), Ledger(0, SOURCES)
    history: list[IterationHistory] = []
    uses: Counter[tuple[int, int]] = Counter()
    state: dict[Any, str] = {}
    for iteration, (prompts, reserve) in enumerate(requests):
        held = buffer.groups()
        taken = chosen(held, buffered.wanted(prompts), buffered)
        restarted = HeldGroups(buffered.max_age, buffered.max_uses, steps).extend(
            again(history[reach(iteration, buffered.max_age) :])
        )
        assert restarted.groups() == held
        assert chosen(restarted.groups(), buffered.wanted(prompts), buffered) == taken
        assert len(taken) == min(len(held), buffered.wanted(prompts)), "as many as it holds"
        assert len({(group.iteration, group.ordinal) for group in taken}) == len(taken)
        for group in taken:
            place = group.iteration, group.ordinal
            assert group.age == (iteration - group.iteration) * steps <= buffered.max_age
            assert group.uses == uses[place] < buffered.max_uses
            assert history[group.iteration].verdict[group.ordinal] == "kept"
            uses[place] += 1
        draws = ledger.draw(iteration, prompts - len(taken), reserve)
        assert all(state.get(draw.key, "returned") == "returned" for draw in draws), (
            "a reused group stays trained: it is not drawn again"
        )
        verdicts = [data.draw(st.sampled_from(VERDICTS)) for _ in draws]
        committed = IterationHistory.of(
            iteration,
            [
                GroupOutcome(
                    **vars(draw),
                    verdict=verdict,
                    steps=[iteration * steps + 1 + draw.ordinal % steps] if verdict == "kept" else [],
                    score=data.draw(rewards_),
                    std=data.draw(rewards_),
                )
                for draw, verdict in zip(draws, verdicts, strict=True)
            ],
            by_iteration(taken),
        )
        assert buffer.problems(committed) == []
        uses.update(
            (iteration, draw.ordinal)
            for draw, verdict in zip(draws, verdicts, strict=True)
            if verdict == "kept"
        )
        state |= {draw.key: verdict for draw, verdict in zip(draws, verdicts, strict=True)}
        history.append(committed)
        buffer.apply(committed)
        ledger.apply(committed)
    assert sum(ledger.counts.values()) == sum(len(part.verdict) for part in history), "drawn groups alone"
    assert ledger.counts["kept"] == len(uses), "each trained group has its uses"
    assert not uses or max(uses.values()) <= buffered.max_uses
    assert sum(uses.values()) == len(uses) + sum(len(part.reused_places()) for part in history)


def by_iteration(groups: list[BufferedGroup]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for group in groups:
        found.setdefault(group.iteration, []).append(group.ordinal)
    return found


def held(ordinal: int, iteration: int = 0, **about: Any) -> BufferedGroup:
    return BufferedGroup(
        **{"source": "a", "age": 1, "uses": 1, "reward": 0.5, "reward_std": 0.5, **about},
        iteration=iteration,
        ordinal=ordinal,
    )


GROUPS = [
    held(0, 1, source="a", reward=0.0, reward_std=0.0),
    held(2, 0, source="a", reward=1.0, reward_std=0.3),
    held(0, 0, source="a", reward=0.9, reward_std=0.5),
    held(1, 0, source="b", reward=0.1, reward_std=None),
    held(1, 1, source="b", reward=0.5, reward_std=0.5),
]


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({}, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]),
        ({"choose": "prioritised"}, [(0, 0), (1, 1), (0, 2), (0, 1), (1, 0)]),
        ({"choose": "stratified"}, [(0, 0), (0, 1), (0, 2), (1, 1), (1, 0)]),
        ({"choose": "stratified", "strata": "reward"}, [(0, 1), (1, 1), (0, 0), (1, 0), (0, 2)]),
        (
            {"buffer_filter": {"function": "buffer_filters:youngest", "options": {"most": 2}}},
            [(1, 1), (1, 0)],
        ),
    ],
)
def test_the_order_in_which_groups_are_taken(
    fields: dict[str, Any], order: list[tuple[int, int]], filters: None
) -> None:
    taken = chosen(GROUPS, 9, Settings.model_validate(fields))
    assert [(group.iteration, group.ordinal) for group in taken] == order
    assert chosen(GROUPS, 1, Settings.model_validate(fields)) == taken[:1]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nothing", "it returned a NoneType"),
        ("others", "it returned something that is none of the groups"),
        ("twice", "it returned a group twice"),
        ("broken", "it raised KeyError"),
    ],
)
def test_a_buffer_filter_that_returns_no_groups_of_the_buffer_is_named(
    function: str, says: str, filters: None
) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        chosen(GROUPS, 2, Settings.model_validate({"buffer_filter": f"buffer_filters:{function}"}))
    assert "rollout.buffer.buffer_filter.function = buffer_filters:" in str(raised.value)


@pytest.fixture
def filters(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "buffer_filters.py").write_text(
        "from dataclasses import replace\n"
        "def youngest(groups, most): return list(reversed(groups))[:most]\n"
        "def nothing(groups): return None\n"
        "def others(groups): return [replace(groups[0], ordinal=77)]\n"
        "def twice(groups): return [groups[0], groups[0]]\n"
        "def broken(groups): raise KeyError('x')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def trained(iteration: int, groups: int, reused: dict[int, list[int]] | None = None) -> IterationHistory:
    outcomes = [
        GroupOutcome(source="a", row=row, epoch=iteration, ordinal=row, verdict="kept", steps=[iteration + 1])
        for row in range(groups)
    ]
    return IterationHistory.of(iteration, outcomes, reused)


def test_a_choice_that_the_buffer_could_not_make_is_a_problem() -> None:
    buffer = HeldGroups(max_age=2, max_uses=2, versions=1).extend([trained(0, 2), trained(1, 1, {0: [1]})])
    assert buffer.problems(trained(2, 1, {0: [0], 1: [0]})) == []
    (used,) = buffer.problems(trained(2, 1, {0: [1]}))
    assert used.startswith("it reuses group 1 of iteration 1, which was not held")
    assert buffer.problems(trained(2, 1, {1: [0, 0]})) == ["it reuses a group twice"]
    buffer.apply(trained(2, 1))
    assert [(group.iteration, group.age) for group in buffer.groups()] == [(1, 2), (2, 1)], "0 is too old"


def test_a_history_without_a_buffer_is_stored_as_it_was() -> None:
    assert not {"stds", "reused"} & set(trained(0, 2).model_dump(mode="json"))
    stored = trained(3, 1, {1: [4, 2]}).model_dump(mode="json")
    assert stored["reused"] == {"1": [2, 4]}


@pytest.mark.parametrize(
    ("fresh", "reused", "order"),
    [
        (3, 0, [0, 1, 2]),
        (6, 2, [0, 1, 2, 6, 3, 4, 5, 7]),
        (1, 3, [1, 2, 0, 3]),
        (5, 3, [0, 5, 1, 2, 6, 3, 4, 7]),
    ],
)
def test_reused_groups_are_spread_over_the_batch(fresh: int, reused: int, order: list[int]) -> None:
    assert spread(fresh, reused) == order


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 5))
def test_each_step_gets_its_share_of_reused_groups(fresh: int, reused: int, steps: int) -> None:
    order = spread(fresh, reused)
    assert sorted(order) == list(range(fresh + reused))
    assert [at for at in order if at < fresh] == list(range(fresh)), "drawing order stays"
    if order and len(order) % steps == 0:
        size = len(order) // steps
        shares = [
            sum(at >= fresh for at in order[start : start + size]) for start in range(0, len(order), size)
        ]
        assert max(shares) - min(shares) <= 1
