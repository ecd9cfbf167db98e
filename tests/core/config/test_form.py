"""The form on Prefect's page: what it submits untouched resolves as if nothing was given, whatever the preset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from millrace.core.config import RunConfig
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.algorithm.presets import PRESETS
from millrace.core.config.parts.menu import variants
from millrace.core.config.parts.section import Section
from tests.support.prefect_form import untouched

SCHEMA = RunConfig.model_json_schema()
LEAST: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"path": "m"},
    "data": {"sources": [{"path": "p"}]},
    "evaluation": {"sets": [{"name": "held_out", "path": "h"}]},
}


def merged(values: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """What a user gives over what the form is filled with."""
    result = dict(values)
    for name, value in above.items():
        below = result.get(name)
        both = isinstance(value, dict) and isinstance(below, dict)
        result[name] = merged(below, value) if both and isinstance(below, dict) else value
    return result


def submitted(given: dict[str, Any]) -> dict[str, Any]:
    """What the form submits if its user fills in `given` and leaves the rest."""
    values = merged(untouched(SCHEMA), given)
    for section, name, model in (("data", "sources", "Source"), ("evaluation", "sets", "EvalSet")):
        item = untouched({**SCHEMA["$defs"][model], "$defs": SCHEMA["$defs"]})
        values[section][name] = [merged(item, one) for one in values[section][name]]
    return values


@pytest.mark.parametrize("preset", PRESETS)
def test_an_untouched_form_with_a_preset_is_that_preset(preset: str) -> None:
    given = {**LEAST, "algorithm": {"preset": preset}}
    values = submitted(given)
    jsonschema.validate(values, SCHEMA)
    assert RunConfig.model_validate(values) == RunConfig.model_validate(given)


def test_an_untouched_form_is_the_configuration_that_gives_nothing() -> None:
    values = submitted(LEAST)
    jsonschema.validate(values, SCHEMA)
    assert RunConfig.model_validate(values) == RunConfig.model_validate(LEAST)


def of_presets() -> dict[str, type[Section]]:
    """The section of every field that a preset sets, by the field's path: the choices and their variants' fields too."""
    owned: dict[str, type[Section]] = {}
    for fields in PRESETS.values():
        for name, value in fields.items():
            owned[name] = Algorithm
            if name in ("advantage", "loss") and isinstance(value, dict):
                default = {"advantage": "group_relative", "loss": "clipped"}[name]
                variant = variants(Algorithm.model_fields[name])[value.get("kind", default)]
                owned |= {f"{name}.{variant.__name__}.{key}": variant for key in value if key != "kind"}
    return owned


NULL_IS_A_VALUE = ("overlong", "constant_length")  # null is no penalty, and the generation budget


@pytest.mark.parametrize("path", of_presets())
def test_the_form_shows_nothing_in_a_field_that_a_preset_sets(path: str) -> None:
    section, name = of_presets()[path], path.rpartition(".")[2]
    shown = SCHEMA["$defs"][section.__name__]["properties"][name]
    if path in NULL_IS_A_VALUE:
        assert "default" not in shown
        assert name not in untouched({**SCHEMA["$defs"]["Algorithm"], "$defs": SCHEMA["$defs"]})
    else:
        assert shown["default"] is None
        assert {"type": "null", "title": "the preset's"} in shown["anyOf"]


@pytest.mark.parametrize("preset", PRESETS)
def test_null_is_the_presets_value(preset: str) -> None:
    alone = Algorithm(preset=preset)
    paths = [path for path in of_presets() if "." not in path and path not in NULL_IS_A_VALUE]
    assert Algorithm.model_validate({"preset": preset, **dict.fromkeys(paths)}) == alone
    for choice in ("advantage", "loss"):
        variant = type(getattr(alone, choice))
        nulls = {
            path.rpartition(".")[2]: None
            for path in of_presets()
            if path.startswith(f"{choice}.{variant.__name__}.")
        }
        kind = getattr(alone, choice).kind
        assert Algorithm.model_validate({"preset": preset, choice: {"kind": kind, **nulls}}) == alone


def test_null_in_a_variant_that_is_not_the_presets_is_the_default() -> None:
    given = {"preset": "gspo", "loss": {"kind": "clipped", "clip_low": None, "clip_high": None}}
    assert Algorithm.model_validate(given) == Algorithm(preset="gspo", loss="clipped")


@pytest.mark.parametrize(
    ("given", "loss"),
    [({"loss": "cispo"}, "cispo"), ({"loss": {"kind": "sapo"}}, "sapo"), ({"loss": None}, "gspo")],
)
def test_what_the_user_chooses_in_the_form_overrides_the_preset(given: dict[str, Any], loss: str) -> None:
    values = submitted({**LEAST, "algorithm": {"preset": "gspo", **given}})
    jsonschema.validate(values, SCHEMA)
    assert RunConfig.model_validate(values).algorithm.loss.kind == loss


def test_dapo_without_its_penalty_is_a_word_in_the_form() -> None:
    values = submitted({**LEAST, "algorithm": {"preset": "dapo", "overlong": "none"}})
    jsonschema.validate(values, SCHEMA)
    assert RunConfig.model_validate(values).algorithm == Algorithm(preset="dapo", overlong=None)


def test_other_fields_than_those_of_presets_refuse_null_as_before() -> None:
    with pytest.raises(ValueError, match="entropy_coef"):
        Algorithm.model_validate({"entropy_coef": None})


def properties(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a schema and of what it is made of, by name."""
    yield from schema.get("properties", {}).items()
    for option in schema.get("anyOf", []):
        yield from properties(option)


@pytest.mark.parametrize("section", SCHEMA["$defs"])
def test_every_field_of_the_form_is_labelled_by_its_name(section: str) -> None:
    definition = SCHEMA["$defs"][section]
    assert definition["title"] in (section, section.removesuffix("Section"))
    assert all(field["title"] == name for name, field in properties(definition))
    assert all(field["title"] == name for name, field in properties(SCHEMA))


def test_a_choice_between_a_function_and_its_path_has_names() -> None:
    for section, title in {"UserFunction": "UserFunction", "RewardSection": "Reward"}.items():
        form = SCHEMA["$defs"][section]
        assert (form["title"], [option["title"] for option in form["anyOf"]]) == (
            title,
            [section, "import path"],
        )
