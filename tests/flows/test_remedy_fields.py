"""A field that a message names exists, and one that it says to change in a run may change when the run is started again."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from millrace.core.config.parts.restart import Restart, restart_of
from millrace.core.config.parts.section import models
from millrace.core.config.reading.findings import all_fields
from millrace.core.config.run_config import RunConfig
from tests.flows.test_remedies import sentences

FIELD = re.compile(rf"(?<![\w./-])(?:{'|'.join(RunConfig.model_fields)})\.[a-z_0-9.\[\]]*[a-z_0-9]")
NOT_FIELDS = {  # names of files and tensors, which begin as a section's name does
    "run.json",
    "run.yaml",
    "run.js",
    "model.safetensors",
    "model.safetensors.index.json",
    "model.layers",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "model.language_model",
    "model.visual",
}
# What these say comes before a run, from the check of its configuration, or describes a field
BEFORE_A_RUN = (
    "core/config/",
    "core/families/",
    "core/hooks/slime/",
    "flows/preflight/",
    "flows/quickstart.py",
    "flows/commands/new.py",
)
CHANGE = re.compile(
    r"\b(?:set|raise|lower|increase|reduce|remove|give|put|choose|change|correct)\b", re.IGNORECASE
)
ELSEWHERE = re.compile(r"\bbranch\b|\bnew run\b|start (?:\w+ ){0,3}under another", re.IGNORECASE)
NOT_ASKED_FOR = {  # file and field: why the field need not change when the run is started again
    ("core/accounts/ledger.py", "run.seed"): "one of the causes that are listed; the remedy puts it back",
    ("core/accounts/ledger.py", "data.shuffle"): "one of the causes that are listed; the remedy puts it back",
    (
        "core/rewards/hub/ifeval.py",
        "data.sources[].extra_keys",
    ): "the check scores rows before a run; later the row is corrected",
    ("connectors/engines/sglang/client.py", "model.dtype"): "a place to look at, not a change",
    ("flows/commands/terminal.py", "run.name"): "an example of how a field is set",
    (
        "connectors/trainers/checkpoint/base_weights.py",
        "trainer.lora",
    ): "of another run's checkpoint: a run keeps its own adapters",
    ("flows/commands/deploy.py", "run.name"): "of a file that is deployed, before any run of it",
    **{
        (
            "flows/driver/rollouts_source.py",
            f"trainer.{name}",
        ): "of a new run: one that exists has its source's number of steps"
        for name in ("global_batch", "passes")
    },
}


def known(path: str) -> str | None:
    """The field that a name means: itself, or the one that holds it as an option; None if there is none."""
    fields = all_fields()
    plain = re.sub(r"\.\d+(?=\.|$)", "[]", path).replace("evaluation.sets.held_out", "evaluation.sets[]")
    parts = plain.removesuffix("[]").split(".")
    for length in range(len(parts), 1, -1):
        name = ".".join(parts[:length])
        if name in fields and (length == len(parts) or _is_free(fields[name].annotation)):
            return name
    return None


def _is_free(annotation: Any) -> bool:
    """Whether a field holds options whose names are not millrace's, or a function with options of its own."""
    return get_origin(annotation) is dict or any(_is_free(part) for part in get_args(annotation))


def decisions(
    model: type[BaseModel] = RunConfig, at: str = "", above: Restart | None = None
) -> dict[str, Restart]:
    """Whether each field may change when a run is started again: its own decision or that of the section above it."""
    found: dict[str, Restart] = {}
    for name, field in model.model_fields.items():
        path, decision = f"{at}{name}", restart_of(field, above)
        below = "[]." if get_origin(field.annotation) is list else "."
        for section in models(field.annotation):
            found |= decisions(section, f"{path}{below}", decision)
        if decision is not None:
            found[path] = decision
    return found


def test_a_field_that_a_text_names_exists() -> None:
    named = {(name, place) for place, text in sentences() for name in FIELD.findall(text)}
    assert sorted(each for each in named if each[0] not in NOT_FIELDS and not known(each[0])) == []


def test_what_is_listed_as_no_field_is_named_and_is_none() -> None:
    named = {name for _, text in sentences() for name in FIELD.findall(text)}
    assert [name for name in NOT_FIELDS if known(name) or name not in named] == []


def remedies() -> list[tuple[str, str, str]]:
    """Texts of a run that say to change fields, with each field and their place."""
    return [
        (place, text, field)
        for place, text in sentences()
        if not place.startswith(BEFORE_A_RUN) and CHANGE.search(text) and not ELSEWHERE.search(text)
        for field in (known(name) for name in FIELD.findall(text))
        if field
    ]


def test_a_field_that_a_remedy_says_to_change_may_change_when_the_run_is_started_again() -> None:
    may = decisions()
    assert len({field for _, _, field in remedies()}) > 10
    refused = [
        (place, field, text)
        for place, text, field in remedies()
        if not may[field].resume and (place.split(":")[0], field) not in NOT_ASKED_FOR
    ]
    assert refused == []


def test_exceptions_are_still_named() -> None:
    named = {(place.split(":")[0], field) for place, _, field in remedies()}
    assert set(NOT_ASKED_FOR) <= named
