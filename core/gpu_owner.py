"""Who holds the memory of GPUs that trainer and engines share, as a pure state machine.

Owns the states and their transitions; knows nothing of ranks, engines or bytes. One side holds the memory at a time:
the trainer to train, save or be built, the engines to generate. Weights pass while the trainer is offloaded to the host and
engines have room for weights alone (handing over).

    owner = GpuOwner()                       # free
    owner = owner.after(Event.TRAINER_TOOK)  # the trainer builds, trains, saves
    owner.after(Event.ENGINES_WOKE)          # ValueError: the trainer must be offloaded first

A release is allowed in every state: releasing memory that one does not hold changes nothing. If the configuration lets a side
keep its memory because there is room for both (placement.offload_engines, placement.offload_trainer), its release frees
nothing, and the turns stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Holder(StrEnum):
    """The holder of the memory."""

    FREE = "free"  # neither: engines asleep or not started, trainer offloaded or not built
    TRAINER = "trainer"  # weights, gradients, optimizer state and activations
    HANDING_OVER = "handing_over"  # weights of the trainer and of engines, or what a dead driver left
    ENGINES = "engines"  # weights and KV cache


class HolderEvent(StrEnum):
    """Events that change the holder."""

    ENGINES_SLEPT = "engines_slept"  # all engines have released weights and KV cache
    TRAINER_OFFLOADED = "trainer_offloaded"  # everything but its weights is on the host
    TRAINER_TOOK = "trainer_took"  # it builds, trains or saves
    UPDATE_BEGAN = "update_began"  # engines take memory for weights, which the trainer sends
    ENGINES_WOKE = "engines_woke"  # engines take all their memory and serve
    TRAINER_DIED = "trainer_died"
    ENGINE_DIED = "engine_died"  # one engine died; the others keep their memory


# The transitions that must not exist: the trainer takes memory while engines hold any (engines, handing_over), and engines
# take memory while the trainer holds it (trainer). Either would end in an out-of-memory error of the second side.
TRANSITIONS: dict[tuple[Holder, HolderEvent], Holder] = {
    (Holder.FREE, HolderEvent.TRAINER_TOOK): Holder.TRAINER,
    (Holder.TRAINER, HolderEvent.TRAINER_TOOK): Holder.TRAINER,
    (Holder.TRAINER, HolderEvent.TRAINER_OFFLOADED): Holder.FREE,
    (Holder.TRAINER, HolderEvent.TRAINER_DIED): Holder.FREE,
    (Holder.FREE, HolderEvent.UPDATE_BEGAN): Holder.HANDING_OVER,
    (Holder.HANDING_OVER, HolderEvent.UPDATE_BEGAN): Holder.HANDING_OVER,
    (Holder.ENGINES, HolderEvent.UPDATE_BEGAN): Holder.HANDING_OVER,
    (Holder.FREE, HolderEvent.ENGINES_WOKE): Holder.ENGINES,
    (Holder.HANDING_OVER, HolderEvent.ENGINES_WOKE): Holder.ENGINES,
    (Holder.ENGINES, HolderEvent.ENGINES_WOKE): Holder.ENGINES,
    (Holder.HANDING_OVER, HolderEvent.ENGINES_SLEPT): Holder.FREE,
    (Holder.ENGINES, HolderEvent.ENGINES_SLEPT): Holder.FREE,
    # a release by the other side, and a death on a side that holds nothing, change nothing
    (Holder.FREE, HolderEvent.ENGINES_SLEPT): Holder.FREE,
    (Holder.TRAINER, HolderEvent.ENGINES_SLEPT): Holder.TRAINER,
    (Holder.FREE, HolderEvent.TRAINER_OFFLOADED): Holder.FREE,
    (Holder.HANDING_OVER, HolderEvent.TRAINER_OFFLOADED): Holder.HANDING_OVER,
    (Holder.ENGINES, HolderEvent.TRAINER_OFFLOADED): Holder.ENGINES,
    (Holder.FREE, HolderEvent.TRAINER_DIED): Holder.FREE,
    (Holder.HANDING_OVER, HolderEvent.TRAINER_DIED): Holder.HANDING_OVER,  # engines may hold weights
    (Holder.ENGINES, HolderEvent.TRAINER_DIED): Holder.ENGINES,
    **{(holder, HolderEvent.ENGINE_DIED): holder for holder in Holder},
}


@dataclass(frozen=True)
class GpuOwner:
    """Who holds the memory now."""

    holder: Holder = Holder.FREE

    def after(self, event: HolderEvent) -> GpuOwner:
        """The owner after an event. Raises ValueError for an event that must not happen in this state."""
        following = TRANSITIONS.get((self.holder, event))
        if following is None:
            raise ValueError(f"{event} while GPU memory is held: {self.holder}")
        return GpuOwner(following)
