"""Every place of a configuration that takes text or a mapping, and so could hold a secret: made from the models."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from millrace.core.config import RunConfig
from millrace.core.config.parts.menu import menu_of, variants
from millrace.core.config.parts.section import models

KINDS = {"dict": "mapping", "list": "list"}
Place = tuple[str | int, ...]


def places(model: type[BaseModel] = RunConfig, above: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every field that takes text or a mapping, those of all variants and list items too; and what it takes."""
    for name, field in model.model_fields.items():
        here = (*above, name)
        menu = menu_of(field)
        below = variants(field).values() if menu else models(field.annotation)
        annotation = str(field.annotation)
        if "str" in annotation and not below and "Literal" not in annotation:
            yield here, next((what for word, what in KINDS.items() if word in annotation), "text")
        for section in below:
            item = (*here, 0) if getattr(field.annotation, "__origin__", None) is list else here
            kind = section.model_fields["kind"].default if menu else None
            yield from (
                (place, what) for place, what in places(section, (*item, f"kind={kind}") if menu else item)
            )


PLACES = sorted(set(places()), key=str)


def path(place: Place) -> str:
    """A place as a field's path, without the kinds of choices."""
    return ".".join(str(part) for part in place if not str(part).startswith("kind="))
