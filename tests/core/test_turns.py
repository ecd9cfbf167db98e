"""Which stored rows of a rollout count, over random histories of losses, restarts and rollouts that ask for something else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.contracts.turns import TurnKind, TurnRow, first_gap, rows_that_count

# of each life of a rollout: how many events it finds before it asks for something else (None: never does), how many it
# adds, and which of the stored rows are then lost
Lives = list[tuple[int | None, int, set[int]]]
LIVES = st.lists(
    st.tuples(st.none() | st.integers(0, 4), st.integers(0, 4), st.sets(st.integers(0, 30), max_size=3)),
    min_size=1,
    max_size=6,
)


def row(order: int, branch: int, event: int, kind: TurnKind, text: str = "") -> TurnRow:
    """A row with what these rules read, and a text to know it by."""
    return TurnRow(
        rollout_id="r",
        group_id="g",
        order=order,
        branch=branch,
        event=event,
        kind=kind,
        text=text,
    )


@given(LIVES)
def test_what_a_life_made_is_what_is_read_unless_it_was_lost(lives: Lives) -> None:
    stored: list[TurnRow] = []
    for life, (asks_otherwise_at, adds, lost) in enumerate(lives):
        order = max((r.order for r in stored), default=-1) + 1
        gap = first_gap(stored)
        if gap is not None:
            stored.append(row(order, 0, gap, "resumed"))
            order += 1
        said = [r.text for r in rows_that_count(stored)]
        if asks_otherwise_at is not None and asks_otherwise_at < len(said):
            stored.append(row(order, 0, asks_otherwise_at, "diverged"))
            order += 1
            del said[asks_otherwise_at:]
        for number in range(adds):
            said.append(f"{life}.{number}")
            stored.append(row(order, 0, len(said) - 1, "segment", said[-1]))
            order += 1
        assert [r.text for r in rows_that_count(reversed(stored))] == said
        assert first_gap(stored) is None
        assert len({r.order for r in stored}) == len(stored)
        stored = [r for number, r in enumerate(stored) if number not in lost]


def test_another_branch_keeps_its_events_when_one_diverges() -> None:
    rows = [row(0, 0, 0, "segment", "a"), row(1, 1, 0, "segment", "b"), row(2, 0, 0, "diverged")]
    assert [r.text for r in rows_that_count(rows)] == ["b"]
