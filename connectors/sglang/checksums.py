"""Comparing two engines' checksums of the tensors that they hold. Pure."""

from __future__ import annotations

from typing import Any

NAMED = 5  # differing tensors that a message names


def differing_tensors(one: Any, other: Any) -> list[str]:
    """Names of the tensors that differ in two answers with checksums; SGLang's answer has them once per GPU."""
    left, right = _tensors(one), _tensors(other)
    places = {**left, **right}
    return list(dict.fromkeys(place[-1] for place in places if left.get(place) != right.get(place)))


def describe_difference(index: int, before: Any, after: Any) -> str:
    """The tensors of one engine that differ, in words."""
    names = differing_tensors(before, after)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"engine-{index} in {', '.join(names[:NAMED]) or 'tensors that it does not name'}{more}"


def _tensors(answer: Any, *place: str) -> dict[tuple[str, ...], Any]:
    """Every checksum of a tensor, by its place in the answer, which ends with the tensor's name."""
    if place and place[-1] == "checksums":
        return {(*place, name): value for name, value in answer.items()}
    items = (
        answer.items() if isinstance(answer, dict) else enumerate(answer) if isinstance(answer, list) else ()
    )
    return {key: value for name, below in items for key, value in _tensors(below, *place, str(name)).items()}
