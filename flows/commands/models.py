"""`millrace models`: the presets of `model.preset`, and one's layouts and notes."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from millrace.core.config.parts.problems import nearest
from millrace.core.config.plan.memory import size_text
from millrace.core.config.plan.preset_memory import layout_memory
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import resolved
from millrace.core.families.presets import PRESETS
from millrace.core.families.registry import family_named
from millrace.flows.commands.listing import CsvOption, JsonOption, Listing, print_listing
from millrace.flows.commands.terminal import guarded

COLUMNS = ("preset", "family", "parameters", "gpus", "memory_a_gpu", "of_gb")
OF_ONE = (
    *("gpus", "tensor", "pipeline", "expert", "recompute", "gpus_an_engine"),
    *("trainer_memory", "weights_memory", "of_gb"),
)


def models(
    name: Annotated[str | None, typer.Argument(help="Preset to show with its layouts and notes.")] = None,
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """List the presets of model.preset: parameters, GPUs and memory. With a name, its layouts and notes."""
    print_listing(presets_listing() if name is None else guarded(lambda: preset_listing(name)), json, csv)


def presets_listing() -> Listing:
    """Every preset, with its layout of the fewest GPUs."""
    rows: list[Sequence[Any]] = []
    for name, preset in PRESETS.items():
        least = layout_memory(name)[0]
        counts = " ".join(str(layout.gpus) for layout in preset.layouts)
        row = (name, family_of_preset(name), parameters_of(name), counts)
        rows.append((*row, size_text(least.trainer), least.gpu))
    return Listing(COLUMNS, rows)


def preset_listing(name: str) -> Listing:
    """One preset's layouts, each for its GPUs and their multiples. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError("no such preset", where=name, remedy=nearest(name, PRESETS))
    preset = PRESETS[name]
    facts = {
        "model": preset.model,
        "family": family_of_preset(name),
        "parameters": f"{parameters_of(name):,}",
        "sampling": preset.sampling,
        "notes": preset.notes,
    }
    rows: list[Sequence[Any]] = [
        (
            *(at.layout.gpus, at.layout.tensor, at.layout.pipeline, at.layout.expert),
            *(at.layout.recompute, at.layout.engine, size_text(at.trainer), size_text(at.weights), at.gpu),
        )
        for at in layout_memory(name)
    ]
    return Listing(OF_ONE, rows, facts)


def family_of_preset(name: str) -> str:
    """The title of a preset's family."""
    return family_named(PRESETS[name].config["model_type"]).title


def parameters_of(name: str) -> int:
    """The number of a preset's parameters."""
    preset = PRESETS[name]
    return architecture(resolved(preset.config, preset.model)).parameters
