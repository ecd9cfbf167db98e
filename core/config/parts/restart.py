"""Which fields may differ when a run is started again, and in a branch of it. Knows no section.

Each field has a decision: its own, or that of the nearest section above it. A field that may change acts from the first
step, or the first task of its kind, after the start. A change of any other field is refused at the start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.core.config.parts.redaction import shown, without_secrets


@dataclass(frozen=True)
class Restart:
    """Annotation of a field: whether a resume and a branch may change it, and if not, why.

    moves: the field is a path that may change as long as the content there is the same.
    """

    resume: bool
    branch: bool
    because: str = ""
    moves: bool = False


ANY_START = Restart(resume=True, branch=True)


def in_a_branch(because: str, moves: bool = False) -> Restart:
    """Fixed in a run; a branch may change it."""
    return Restart(resume=False, branch=True, because=because, moves=moves)


def fixed(because: str, moves: bool = False) -> Restart:
    """Fixed in a run and in its branches."""
    return Restart(resume=False, branch=False, because=because, moves=moves)


@dataclass(frozen=True)
class Change:
    """A field that differs between two configurations."""

    path: str
    before: Any
    now: Any
    restart: Restart

    @property
    def moved(self) -> bool:
        """Whether only a path changed whose content decides."""
        return self.restart.moves and self.before is not None and self.now is not None


def restart_of(field: FieldInfo, above: Restart | None = None) -> Restart | None:
    """The decision on a field: its own, else the one above it."""
    return next((item for item in field.metadata if isinstance(item, Restart)), above)


def changes(
    before: BaseModel, now: BaseModel, path: str = "", above: Restart | None = None
) -> Iterator[Change]:
    """Every field that differs, in the order of the sections. A section of another kind is one change."""
    for name, field in type(now).model_fields.items():
        restart = restart_of(field, above)
        old, new = getattr(before, name), getattr(now, name)
        yield from _changes(old, new, f"{path}{name}", restart)


def _changes(old: Any, new: Any, path: str, restart: Restart | None) -> Iterator[Change]:
    if isinstance(old, BaseModel) and isinstance(new, BaseModel) and type(old) is type(new):
        yield from changes(old, new, f"{path}.", restart)
    elif _is_list_of_sections(old) and _is_list_of_sections(new) and _names(old) == _names(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from changes(one, other, f"{path}.{number}.", restart)
    elif old != new and without_secrets(_plain(old)) != without_secrets(_plain(new)):
        assert restart is not None, f"{path} has no decision"
        yield Change(path, _shown(old), _shown(new), restart)


def decided(
    section: BaseModel, path: str = "", above: Restart | None = None
) -> Iterator[tuple[str, Any, Restart]]:
    """Every value of a configuration with its path and decision, also within lists and choices."""
    for name, field in type(section).model_fields.items():
        restart, value = restart_of(field, above), getattr(section, name)
        if isinstance(value, BaseModel):
            yield from decided(value, f"{path}{name}.", restart)
        elif value and _is_list_of_sections(value):
            for number, item in enumerate(value):
                yield from decided(item, f"{path}{name}.{number}.", restart)
        else:
            assert restart is not None, f"{path}{name} has no decision"
            yield f"{path}{name}", value, restart


def _is_list_of_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, BaseModel) for item in value)


def _names(sections: list[Any]) -> list[Any]:
    return [getattr(section, "name", number) for number, section in enumerate(sections)]


def _shown(value: Any) -> Any:
    """A value as a message shows it: a choice by its kind, a list of sections by their names."""
    if isinstance(value, BaseModel):
        return getattr(value, "kind", None) or value.model_dump(mode="json")
    if value and _is_list_of_sections(value):
        return _names(value)
    return shown(value)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {"": type(value).__name__, **value.model_dump()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
