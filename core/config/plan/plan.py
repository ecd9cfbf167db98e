"""The plan of a run, as `millrace check` prints it. Reads the model's config.json and nothing else."""

from dataclasses import dataclass

from millrace.core.config.plan.layout import Layout, layout_of, visible_gpus
from millrace.core.config.plan.memory import (
    MemoryPart,
    disk,
    engine_memory,
    files,
    host_memory,
    trainer_memory,
)
from millrace.core.config.plan.numbers import Numbers, numbers_of
from millrace.core.config.plan.offload import HostStep, host_step
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config


@dataclass(frozen=True)
class Plan:
    """The plan of a run; memory and disk are empty if the model is not there yet."""

    run: str
    numbers: Numbers
    layout: Layout
    parameters: int | None
    trainer_memory: list[MemoryPart]
    host_memory: list[MemoryPart]
    host_step: HostStep | None
    engine_memory: list[MemoryPart]
    disk: list[MemoryPart]
    files: list[str]


def make_plan(config: RunConfig, gpus: int | None = None) -> Plan:
    """The plan of a checked configuration. gpus: number on this host; looked up when not given."""
    layout = layout_of(config, visible_gpus() if gpus is None else gpus)
    numbers = numbers_of(config)
    try:
        shape = architecture(read_hf_config(config.model.path))
    # run.prepare makes the model's folder
    except ConfigError:
        shape = None
    root = f"{config.storage.root.rstrip('/')}/{config.run.name}"
    return Plan(
        run=config.run.name,
        numbers=numbers,
        layout=layout,
        parameters=shape.parameters if shape else None,
        trainer_memory=trainer_memory(config, shape) if shape and layout.world_size else [],
        host_memory=host_memory(config, shape, layout) if shape else [],
        host_step=host_step(config, shape)
        if shape and layout.device == "cuda" and layout.world_size
        else None,
        engine_memory=engine_memory(config, shape, layout) if shape and config.generates else [],
        disk=disk(config, shape, numbers) if shape else [],
        files=files(config, root),
    )
