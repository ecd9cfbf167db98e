"""The memory that a preset's layouts need of each GPU, by the plan's estimates: who needs 80 GB GPUs, and who needs 141 GB."""

from dataclasses import dataclass

from millrace.core.config.plan.memory import trainer_memory
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import resolved
from millrace.core.families.presets import PRESETS, PresetLayout

GIB = 2**30
KINDS = {80: 79.6, 141: 140.4}  # GB in a GPU's name, and GiB that it has
USED = 0.9  # of it; the rest is the CUDA context, NCCL and fragments
HELD = 0.75  # of what is used, by the weights of trainer and engine together; the rest is KV cache


@dataclass(frozen=True)
class LayoutMemory:
    """A layout with its memory in a GPU. trainer: bytes while it trains; weights: of trainer and engine while it generates."""

    layout: PresetLayout
    trainer: int
    weights: int

    @property
    def gpu(self) -> int | None:
        """The smallest kind of GPU that it fits, in GB; None if it fits none."""
        return next((name for name, size in KINDS.items() if self._fits(size * GIB * USED)), None)

    def _fits(self, used: float) -> bool:
        return self.trainer <= used and self.weights <= HELD * used


def preset_config(name: str, gpus: int) -> RunConfig:
    """A configuration with a preset on so many GPUs, and nothing else that decides its memory."""
    values = {
        "run": {"name": name},
        "model": {"path": PRESETS[name].model, "preset": name, "dtype": "bfloat16"},
        "data": {"sources": [{"path": "train.jsonl"}]},
        "trainer": {"world_size": gpus},
    }
    return RunConfig.model_validate(values)


def layout_memory(name: str) -> list[LayoutMemory]:
    """The memory of each layout of a preset."""
    preset = PRESETS[name]
    shape = architecture(resolved(preset.config, preset.model))
    found = []
    for layout in preset.layouts:
        parts = trainer_memory(preset_config(name, layout.gpus), shape)
        engine = 2 * shape.parameters // layout.engine
        found.append(LayoutMemory(layout, sum(part.size for part in parts), parts[0].size + engine))
    return found
