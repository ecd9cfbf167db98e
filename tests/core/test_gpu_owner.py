"""GPU memory that two sides share has one holder: every transition, and the ones that must not exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.gpu_owner import GpuOwner, Holder, HolderEvent

FREE, TRAINER, HANDING_OVER, ENGINES = Holder
TABLE = {  # what each event makes of free, trainer, handing_over, engines; None must not happen
    HolderEvent.ENGINES_SLEPT: (FREE, TRAINER, FREE, FREE),
    HolderEvent.TRAINER_OFFLOADED: (FREE, FREE, HANDING_OVER, ENGINES),
    HolderEvent.TRAINER_TOOK: (TRAINER, TRAINER, None, None),
    HolderEvent.UPDATE_BEGAN: (HANDING_OVER, None, HANDING_OVER, HANDING_OVER),
    HolderEvent.ENGINES_WOKE: (ENGINES, None, ENGINES, ENGINES),
    HolderEvent.TRAINER_DIED: (FREE, FREE, HANDING_OVER, ENGINES),
    HolderEvent.ENGINE_DIED: (FREE, TRAINER, HANDING_OVER, ENGINES),
}
CASES = [
    (holder, event, following)
    for event, row in TABLE.items()
    for holder, following in zip(Holder, row, strict=True)
]


def test_the_table_has_every_event() -> None:
    assert set(TABLE) == set(HolderEvent)


@pytest.mark.parametrize(("holder", "event", "following"), CASES)
def test_what_follows(holder: Holder, event: HolderEvent, following: Holder | None) -> None:
    owner = GpuOwner(holder)
    if following is None:
        with pytest.raises(ValueError, match=f"{event} while GPU memory is held: {holder}"):
            owner.after(event)
    else:
        assert owner.after(event).holder is following


@given(st.lists(st.sampled_from(HolderEvent)))
def test_the_side_that_takes_memory_finds_that_the_other_gave_it_back(events: list[HolderEvent]) -> None:
    """A plain account of both sides' memory: after any history that the machine allows, never both hold all of theirs."""
    owner, trainer, engines = GpuOwner(), False, False
    for event in events:
        try:
            owner = owner.after(event)
        except ValueError:
            continue
        trainer = {
            HolderEvent.TRAINER_TOOK: True,
            HolderEvent.TRAINER_OFFLOADED: False,
            HolderEvent.TRAINER_DIED: False,
        }.get(event, trainer)
        engines = {
            HolderEvent.UPDATE_BEGAN: True,
            HolderEvent.ENGINES_WOKE: True,
            HolderEvent.ENGINES_SLEPT: False,
        }.get(event, engines)
        assert not (trainer and engines)
        assert trainer == (owner.holder is Holder.TRAINER)
        assert engines == (owner.holder in (Holder.ENGINES, Holder.HANDING_OVER))
