"""What becomes of two features at once: computed by the configuration's own rules, without anything being started.

refused        the rules refuse both together, though each goes alone: the problems name fields of both
one value      both set one field, to different values
no effect      accepted, and one of the two does nothing beside the other
elsewhere      accepted, and one of the two does not run here: a test of its own holds it
runs           accepted, and one of the kept runs has both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, Literal

from millrace.core.config.parts.problems import Problem
from millrace.core.config.reading.load import validate
from millrace.core.config.rules import problems
from tests.pairs.features import BASE, FEATURES
from tests.pairs.idle import idle

Kind = Literal["refused", "one value", "no effect", "elsewhere", "runs"]
EVERY_OTHER = "*"  # among the weights of a stage: each source that has none


@dataclass(frozen=True)
class Together:
    """Several features at once: the settings by field that are accepted, or why none are."""

    settings: Mapping[str, Any]
    clash: str = ""  # the field of which they want different values
    problems: tuple[Problem, ...] = ()

    @property
    def accepted(self) -> bool:
        return not self.clash and not self.problems


@dataclass(frozen=True)
class Outcome:
    """What becomes of a pair, and the sentence that says so."""

    kind: Kind
    text: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def together(names: Sequence[str]) -> Together:
    """The features at once. What one needs is left out where the rules take the others in its place."""
    settings: dict[str, Any] = {}
    for name in names:
        for field, value in FEATURES[name].settings.items():
            have = settings.get(field)
            if have is not None and isinstance(value, list) and have != value:
                settings[field] = [*have, *(item for item in value if item not in have)]
            elif have is not None and have != value:
                return Together({}, clash=field)
            else:
                settings[field] = value
    needs = {
        field: value
        for name in names
        for field, value in FEATURES[name].needs.items()
        if field not in settings
    }
    first: tuple[Problem, ...] = ()
    for left_out in (fields for size in range(len(needs) + 1) for fields in combinations(needs, size)):
        given = {field: value for field, value in needs.items() if field not in left_out}
        wrong = _problems(whole(settings | given))
        if not wrong:
            return Together(settings | given)
        first = first or wrong
    return Together({}, problems=first)


def whole(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration file: the tiny run with the settings, whose sources come beside its own."""
    made = {**BASE, **settings}
    if "data.sources" in settings:
        made["data.sources"] = [*BASE["data.sources"], *settings["data.sources"]]
    if "data.stages" in made:
        named = {source["name"] for source in made["data.sources"]}
        made["data.stages"] = [_all_weights(stage, named) for stage in made["data.stages"]]
    values: dict[str, Any] = {}
    for field, value in made.items():
        *above, last = field.split(".")
        at = values
        for part in above:
            at = at.setdefault(part, {})
        at[last] = value
    return values


def _all_weights(stage: Mapping[str, Any], named: set[str]) -> dict[str, Any]:
    weights = dict(stage["weights"])
    if EVERY_OTHER in weights:
        others = dict.fromkeys(sorted(named - weights.keys()), weights.pop(EVERY_OTHER))
        weights |= others
    return {**stage, "weights": weights}


def _problems(values: dict[str, Any]) -> tuple[Problem, ...]:
    """What the types and the rules say against it."""
    sound, wrong = validate(values)
    return tuple(wrong if sound is None else problems(sound))


def pairs() -> list[tuple[str, str]]:
    """Every two features, in the order of the registry."""
    return list(combinations(FEATURES, 2))


@cache
def pair(one: str, other: str) -> Together:
    """Both at once."""
    return together((one, other))


def outcome(one: str, other: str) -> Outcome:
    """What becomes of both at once."""
    both = pair(one, other)
    if both.clash:
        return Outcome("one value", both.clash)
    if both.problems:
        return Outcome(
            "refused", "; ".join(f"{problem.field}: {problem.reason}" for problem in both.problems)
        )
    for name in (one, other):
        if elsewhere := FEATURES[name].elsewhere:
            return Outcome("elsewhere", f"{name} {elsewhere.why}: {elsewhere.test}")
    if since := idle(one, other) or idle(other, one):
        return Outcome("no effect", since)
    return Outcome("runs")


def to_run() -> set[frozenset[str]]:
    """The pairs that a run must have."""
    return {frozenset(both) for both in pairs() if outcome(*both).kind == "runs"}
