"""The one shape in which a configuration names a function of the user. Knows nothing of who calls it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from millrace.core.config.parts.section import Section

IMPORT_PATH = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|slime:[A-Za-z_][\w.]*\.[A-Za-z_]\w*)$"


class UserFunction(Section):
    """Your function. A bare string is its import path."""

    function: str = Field(pattern=IMPORT_PATH, description="Import path: package.module:function.")
    options: dict[str, Any] = Field({}, description="Keyword arguments handed to the function at every call.")

    @model_validator(mode="before")
    @classmethod
    def _from_import_path(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        made = super().__get_pydantic_json_schema__(schema, handler)
        # in a variant of a choice a bare string is a kind
        if "kind" in cls.model_fields:
            return made
        forms = (getattr(item, "pattern", None) for item in cls.model_fields["function"].metadata)
        bare = {"type": "string", "pattern": next(filter(None, forms)), "title": "import path"}
        return {"title": cls.__name__.removesuffix("Section"), "anyOf": [made, bare]}


def listed(value: Any) -> Any:
    """Turn a mapping of names to functions into a list of named functions."""
    if not isinstance(value, Mapping):
        return value
    return [
        {"name": name, **({"function": item} if isinstance(item, str) else item)}
        if isinstance(item, str | Mapping)
        else item
        for name, item in value.items()
    ]


class Named(Protocol):
    """An item of a list of the configuration."""

    @property
    def name(self) -> str: ...


class UnknownNameError(ValueError):
    """A row names what the configuration does not have."""


Item = TypeVar("Item", bound=Named)


def named_by_row(
    items: Sequence[Item],
    metadata: Mapping[str, Any],
    key: str,
    field: str,
    unknown: type[UnknownNameError],
) -> Item | None:
    """The item that a row names; None if it names none, or if there are no items.

    key: the metadata's key with the name. field: the configuration's field with the items. Errors: `unknown`.
    """
    chosen = metadata.get(key) if items else None
    if chosen is None:
        return None
    for item in items:
        if item.name == chosen:
            return item
    names = ", ".join(item.name for item in items)
    raise unknown(f"its metadata.{key} is {str(chosen)[:40]!r}, and {field} has {names}")
