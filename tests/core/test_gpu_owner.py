"""GPU memory that two sides share has one holder: every transition, and the ones that must not exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.gpu_owner import Event, GpuOwner, Holder

FREE, TRAINER, HANDING_OVER, ENGINES = Holder
TABLE = {  # what each event makes of free, trainer, handing_over, engines; None must not happen
    Event.ENGINES_SLEPT: (FREE, TRAINER, FREE, FREE),
    Event.TRAINER_OFFLOADED: (FREE, FREE, HANDING_OVER, ENGINES),
    Event.TRAINER_TOOK: (TRAINER, TRAINER, None, None),
    Event.UPDATE_BEGAN: (HANDING_OVER, None, HANDING_OVER, HANDING_OVER),
    Event.ENGINES_WOKE: (ENGINES, None, ENGINES, ENGINES),
    Event.TRAINER_DIED: (FREE, FREE, HANDING_OVER, ENGINES),
    Event.ENGINE_DIED: (FREE, TRAINER, HANDING_OVER, ENGINES),
}
CASES = [
    (holder, event, following)
    for event, row in TABLE.items()
    for holder, following in zip(Holder, row, strict=True)
]


def test_the_table_has_every_event() -> None:
    assert set(TABLE) == set(Event)


@pytest.mark.parametrize(("holder", "event", "following"), CASES)
def test_what_follows(holder: Holder, event: Event, following: Holder | None) -> None:
    owner = GpuOwner(holder)
    if following is None:
        with pytest.raises(ValueError, match=f"{event} while GPU memory is held: {holder}"):
            owner.after(event)
    else:
        assert owner.after(event).holder is following


@given(st.lists(st.sampled_from(Event)))
def test_the_side_that_takes_memory_finds_that_the_other_gave_it_back(events: list[Event]) -> None:
    """A plain account of both sides' memory: after any history that the machine allows, never both hold all of theirs."""
    owner, trainer, engines = GpuOwner(), False, False
    for event in events:
        try:
            owner = owner.after(event)
        except ValueError:
            continue
        trainer = {
            Event.TRAINER_TOOK: True,
            Event.TRAINER_OFFLOADED: False,
            Event.TRAINER_DIED: False,
        }.get(event, trainer)
        engines = {
            Event.UPDATE_BEGAN: True,
            Event.ENGINES_WOKE: True,
            Event.ENGINES_SLEPT: False,
        }.get(event, engines)
        assert not (trainer and engines)
        assert trainer == (owner.holder is Holder.TRAINER)
        assert engines == (owner.holder in (Holder.ENGINES, Holder.HANDING_OVER))
