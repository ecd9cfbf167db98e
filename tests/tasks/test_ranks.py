"""How the states of several ranks become the trainer's."""

from __future__ import annotations

from typing import Any, cast

import pytest

from millrace.core.errors import ActorLostError
from millrace.tasks.runtime.trainer import Ranks


class Group:
    """Actors that report these states; one is gone if there is none."""

    def __init__(self, states: list[dict[str, Any]]) -> None:
        self._states = states

    async def states(self) -> list[dict[str, Any]]:
        if not self._states:
            raise ActorLostError("trainer-0 is gone")
        return self._states


def save(state: str, url: str = "a") -> dict[str, Any]:
    return {"url": url, "version": 1, "state": state, "reason": None}


@pytest.mark.parametrize(
    ("versions", "together"), [([1, 1], {1}), ([1, 2], {1, 2}), ([1, None], {1, None}), ([], {None})]
)
async def test_versions_are_those_of_all_ranks_and_none_if_one_is_gone(
    versions: list[int | None], together: set[int | None]
) -> None:
    ranks = Ranks(cast(Any, Group([{"version": version} for version in versions])))
    assert await ranks.versions() == together


@pytest.mark.parametrize(
    ("saves", "slowest"),
    [
        ([None, None], None),
        ([save("written"), None], None),
        ([save("written"), save("written", "b")], None),
        ([save("written"), save("written")], save("written")),
        ([save("written"), save("writing")], save("writing")),
        ([save("writing"), save("failed")], save("failed")),
    ],
)
async def test_a_checkpoint_is_as_far_as_its_slowest_rank(saves: list[Any], slowest: Any) -> None:
    """A checkpoint that some rank does not write counts for nothing."""
    assert await Ranks(cast(Any, Group([{"saving": each} for each in saves]))).saving() == slowest
