"""What `model.preset` sets for a number of GPUs, and where a checkpoint differs from the preset. Pure.

A preset sets the split of the model over GPUs that trainer and engines share, and nothing of the algorithm.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.core.config.parts.problems import Problem
from millrace.core.families.config_file import resolved
from millrace.core.families.presets import PRESETS, ModelPreset

FIELD = "model.preset"
GPUS_A_HOST = 8


def preset_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values below the user's: the preset's layout for trainer.world_size GPUs, or its smallest. Empty without one.

    given: a configuration without short forms of its choices.
    """
    preset, world = PRESETS.get(str(_at(given, "model", "preset"))), _count(given, "trainer", "world_size")
    layout = preset.layout(world) if preset else None
    engines = _at(given, "engines", "kind") or "auto"
    on_cpu = _at(given, "trainer", "device") == "cpu" or engines == "embedded"
    # another trainer than megatron-core's refuses layouts
    without = _at(given, "trainer", "rank") or _at(given, "pipeline", "rollouts_only")
    if layout is None or on_cpu or without:
        return {}
    gpus = world or layout.gpus
    values: dict[str, Any] = {
        "trainer": {
            "world_size": gpus,
            "recompute": layout.recompute,
            "parallel": {
                "tensor": layout.tensor,
                "pipeline": layout.pipeline,
                "expert": layout.expert,
                "sequence": layout.tensor > 1,
            },
            **({"megatron": dict(layout.options)} if layout.options else {}),
        }
    }
    supervised = _at(given, "algorithm", "loss", "kind") == "sft"
    if engines == "external" or supervised or _at(given, "pipeline", "rollouts_from"):
        return values
    each = _count(given, "engines", "gpus") or layout.engine
    values["engines"] = {"kind": engines, "gpus": each}
    if each > GPUS_A_HOST and each % GPUS_A_HOST == 0:
        values["engines"]["nodes"] = each // GPUS_A_HOST
        values["placement"] = {"tensor_over_hosts": True}
    if _at(given, "placement", "colocate") is not False:
        values["placement"] = {**values.get("placement", {}), "colocate": True}
        values["engines"]["count"] = max(1, gpus // each)
    return values


def differences(name: str, checkpoint: Mapping[str, Any], folder: str) -> Iterator[Problem]:
    """A problem for each key of config.json in which a checkpoint is not the preset's model. checkpoint: resolved keys."""
    preset, equal = PRESETS[name], [other for other in PRESETS if not _differing(PRESETS[other], checkpoint)]
    remedy = f"set it to {equal[0]}" if equal else "leave it out, and set trainer.parallel"
    for key, value in _differing(preset, checkpoint).items():
        has = checkpoint.get(key, "not a key of it")
        yield Problem(
            FIELD, name, f"{key} is {value} in the preset, and {has} in {folder}/config.json", remedy
        )


def _differing(preset: ModelPreset, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's values of resolved keys that the checkpoint has otherwise."""

    def read(changes: Mapping[str, Any]) -> dict[str, Any]:
        return resolved({**preset.config, **changes}, preset.model)

    also = {key: [read({key: value})[key] for value in values] for key, values in preset.also.items()}
    return {
        key: value
        for key, value in read({}).items()
        if checkpoint.get(key) not in (value, *also.get(key, ()))
    }


def _count(values: Mapping[str, Any], *path: str) -> int | None:
    """A number that is given; None for what is none, which the field itself refuses."""
    found = _at(values, *path)
    return found if type(found) is int and found > 0 else None


def _at(values: Mapping[str, Any], *path: str) -> Any:
    found: Any = values
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
