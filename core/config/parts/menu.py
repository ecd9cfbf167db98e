"""A choice between variants of a section, each with only its own fields. Knows no section."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from millrace.core.config.parts.section import models


@dataclass(frozen=True)
class Menu:
    """Annotation of a union of sections distinguished by `kind`; its text says what each kind is for.

    Two short forms are accepted: a bare string is the variant of that kind with its defaults, and a mapping without `kind`
    is one of the default kind.
    """

    text: str
    default: str

    @property
    def title(self) -> str:
        """The first line of the text."""
        return self.text.partition("\n")[0].strip()

    def complete(self, value: Any) -> Any:
        """The value with its `kind`, which short forms leave out."""
        value = spelled_out(value)
        if isinstance(value, Mapping) and "kind" not in value:
            return {"kind": self.default, **value}
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.complete, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The variants, or the name of a variant that needs no field: forms and deployments accept short forms too."""
        made = handler(schema)
        variants = made.pop("oneOf")
        kinds = made.pop("discriminator")["mapping"]
        models = {kind: handler.resolve_ref_schema({"$ref": ref}) for kind, ref in kinds.items()}
        bare = [kind for kind, model in models.items() if not model.get("required")]
        return {"description": self.title, **made, "anyOf": [*variants, {"type": "string", "enum": bare}]}


def spelled_out(value: Any) -> Any:
    """A bare string as the mapping that it stands for."""
    return {"kind": value} if isinstance(value, str) else value


def menu_of(field: FieldInfo) -> Menu | None:
    """The menu of a field, if it is a choice between variants."""
    return next((item for item in field.metadata if isinstance(item, Menu)), None)


def variants(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """The sections of a choice, by kind."""
    return {model.model_fields["kind"].default: model for model in models(field.annotation)}


def variant_of(field: FieldInfo, value: Any) -> type[BaseModel] | None:
    """The section that a value's kind names; None if the menu has no such kind."""
    menu = menu_of(field)
    assert menu is not None
    complete = menu.complete(value)
    kind = complete.get("kind") if isinstance(complete, Mapping) else None
    return variants(field).get(kind) if isinstance(kind, str) else None
