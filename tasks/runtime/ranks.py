"""All ranks of the trainer, asked by the methods of their Protocol: `await ranks.each(Rank.save, url)`.

Owns how the answers of several ranks become one. Knows nothing of when ranks are built, nor of what they compute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from millrace.connectors.ray.actors import Actor, ActorGroup
from millrace.connectors.trainers.rank import Rank, RankState, SaveState
from millrace.core.errors import ActorLostError

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
# after one rank has failed in a step, the others fail too or wait for it in a collective
FAILED_ALONE_S = 60.0


class Ranks:
    """The group. Every call raises ActorLostError if a rank is gone, otherwise the error of the first rank that failed."""

    def __init__(self, actors: ActorGroup[Rank]) -> None:
        self._actors = actors

    @property
    def rank_0(self) -> Actor[Rank]:
        """The rank that is asked for what one rank has to do alone."""
        return self._actors.actors[0]

    async def each(
        self, method: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Ask all ranks; the answers in order."""
        return await self._actors.call(method, *args, **kwargs)

    async def together(
        self, method: Callable[Concatenate[Rank, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Ask all ranks for something in which they wait for each other; rank 0's answer.

        What all ranks refuse can be asked for again. If only some fail, all are ended, since the others would wait for ever.
        """
        return (await self._actors.call_together(FAILED_ALONE_S, method, *args, **kwargs))[0]

    async def setup(self) -> None:
        """Meet at rank 0's address, build the model and hold version 0."""
        address = await self.rank_0.call(Rank.address)
        await self.each(Rank.setup, address)

    async def versions(self) -> set[int | None]:
        """Weight versions that the ranks hold; {None} if a rank is gone. Does not wait for calls under way."""
        try:
            return {state["version"] for state in await self._states()}
        except ActorLostError as error:
            log.warning("%s", error)
            return {None}

    async def saving(self) -> SaveState | None:
        """The newest uncommitted background checkpoint, by the slowest rank. Does not wait for calls under way."""
        states = [state["saving"] for state in await self._states()]
        known = [state for state in states if state is not None]
        if len(known) < len(states) or len({state["url"] for state in known}) > 1:
            return None
        return min(known, key=lambda state: ("failed", "writing", "written").index(state["state"]))

    async def _states(self) -> list[RankState]:
        return cast(list[RankState], await self._actors.states())
