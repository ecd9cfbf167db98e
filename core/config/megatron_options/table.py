"""A table of every field of one of megatron-core's configuration classes, and the rules that follow.

Owns the form of a table and the check of a configuration's options against it. A table names every field of
every supported version of megatron-core: it is accepted, set by a field of millrace, or refused with a reason. An accepted
field is in all of them. The tests hold it against the installed version.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from millrace.core.config.parts.problems import Problem, nearest
from millrace.core.config.run_config import RunConfig


@dataclass(frozen=True)
class Need:
    """A setting without which an option would do nothing."""

    words: str  # "trainer.recompute=full"
    met: Callable[[RunConfig], bool]


@dataclass(frozen=True)
class Accepted:
    """An option that acts."""

    type: Any  # values that it takes, as pydantic reads annotations
    effect: str
    need: Need | None = None
    experts: bool = False  # acts only in a mixture of experts
    refused_values: Mapping[str, str] = field(default_factory=dict)  # upstream's other values, and why not


@dataclass(frozen=True)
class OptionTable:
    """All fields of one of megatron-core's classes."""

    place: str  # the configuration's field: trainer.megatron
    of: str  # megatron-core's class
    accepted: Mapping[str, Accepted]
    elsewhere: Mapping[str, str]  # the field of millrace that sets it
    refused: Mapping[str, str] = field(repr=False)  # why

    @property
    def names(self) -> set[str]:
        """Every name that the table knows."""
        return {*self.accepted, *self.elsewhere, *self.refused}

    def problems(self, config: RunConfig, options: Mapping[str, Any]) -> Iterator[Problem]:
        """Options that this configuration may not set, with the reason."""
        for name, value in options.items():
            where = f"{self.place}.{name}"
            if name in self.elsewhere:
                yield Problem(
                    where, value, f"it follows from {self.elsewhere[name]}", "remove it and set that instead"
                )
            elif name in self.refused:
                yield Problem(where, value, f"not allowed: {self.refused[name]}", "remove it")
            elif name not in self.accepted:
                reason = f"megatron-core's {self.of} has no such field"
                yield Problem(where, value, reason, nearest(name, self.accepted))
            else:
                yield from self._accepted_problems(config, where, value, self.accepted[name])

    def _accepted_problems(
        self, config: RunConfig, where: str, value: Any, option: Accepted
    ) -> Iterator[Problem]:
        if isinstance(value, str) and value in option.refused_values:
            yield Problem(
                where, value, f"not allowed: {option.refused_values[value]}", "take another or remove it"
            )
            return
        try:
            TypeAdapter(option.type).validate_python(value)
        except ValidationError as error:
            yield Problem(where, value, error.errors()[0]["msg"].lower(), "correct it or remove it")
            return
        if option.need is not None and not option.need.met(config):
            yield Problem(
                where, value, f"it acts only with {option.need.words}", "remove it, or set that too"
            )

    def experts_problems(self, options: Mapping[str, Any]) -> Iterator[Problem]:
        """Options that act only in a mixture of experts, set for a dense model."""
        for name, value in options.items():
            if name in self.accepted and self.accepted[name].experts:
                reason = "it acts only in a mixture of experts, and the model is dense"
                yield Problem(f"{self.place}.{name}", value, reason, "remove it")


def by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    """Turn {reason: "name name ..."} into {name: reason}."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}
