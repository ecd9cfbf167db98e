"""The base of every configuration section: pydantic settings, titles for forms, and which sections a field has."""

from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

# names of files, metrics and folders: dots alone would name a parent folder
NAME = r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$"


class Section(BaseModel):
    """A part of the configuration: immutable; unknown keys and numbers that are not finite are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, allow_inf_nan=False
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """With every field's name as its title: forms then have the labels that files, messages and pages use."""
        made = handler(schema)
        for name, prop in handler.resolve_ref_schema(made).get("properties", {}).items():
            prop["title"] = name
        return made


def models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's annotation names, within lists and unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models(part)]


@dataclass(frozen=True)
class Reads:
    """Annotation of a field whose value, or each item of it, is a path that a run reads.

    or_name: the value may be the name of a model on Hugging Face instead.
    """

    or_name: bool = False


READS = Reads()
