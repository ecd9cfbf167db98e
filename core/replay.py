"""A repeated step: its settings, and whether it equals the recorded step.

A step follows from the weights, its batch, the configuration and the machine's arithmetic. The last two are kept with its
figures as `settings`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict, cast

from pydantic import BaseModel

from millrace.core.config import RunConfig
from millrace.core.config.parts.restart import restart_of
from millrace.core.contracts.ids import iteration_number
from millrace.core.contracts.task_records import StepMetrics, StepSettings
from millrace.core.errors import ReplayedStepError, TrainerError

SECTIONS = ("rollout", "algorithm", "trainer")  # sections that a step reads
# fields of the optimizer that a trainer can change between two steps
NUMBERS = ("betas", "eps", "weight_decay", "clip_grad")
NOT_BUILT_IN = (  # fields that a trainer follows without being rebuilt
    *(f"trainer.optimizer.{name}" for name in NUMBERS),
    "trainer.optimizer.lr",  # the learning rates follow from these, and are among the metrics
    "trainer.schedule.",
    "algorithm.advantage.critic.lr",
    "algorithm.advantage.critic.schedule",
    "trainer.optimizer.offload",  # where a step is made; on a GPU its last bits follow
    "algorithm.on_policy_guard",  # it refuses steps, and changes none
)
# folders that are identified by their files' hashes, and may have another path at another start
MAY_MOVE = ("algorithm.teacher", "algorithm.reference", "algorithm.advantage.critic.path")
LOSS_TOLERANCE = (1e-3, 1e-2)  # absolute, relative
NORM_TOLERANCE = (1e-4, 1e-2)
BFLOAT16_FACTOR = 10.0


def settings_of(config: RunConfig, numerics: Mapping[str, Any]) -> StepSettings:
    """Settings of a step: every field that a step reads and that another start or a branch may change.

    numerics: device, layout and versions, on which the last bits depend.
    """
    sections = {name: config.model_dump(mode="json")[name] for name in SECTIONS}
    return {"configuration": _laid_over(config, sections, None), "numerics": dict(numerics)}


class StepNumbers(TypedDict):
    """What the optimizer makes one step with."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float


def numbers_of(recorded: StepMetrics, prefix: str = "") -> StepNumbers:
    """The optimizer's numbers of a recorded step.

    prefix: of the model's metrics, "critic_" for the critic.
    """
    figures: Mapping[str, Any] = recorded
    optimizer = recorded["settings"]["configuration"]["trainer"]["optimizer"]
    numbers = {"lr": figures[f"{prefix}lr"], **{name: optimizer[name] for name in NUMBERS}}
    return cast(StepNumbers, numbers)


def settings_again(recorded: StepMetrics | None, now: StepSettings) -> StepSettings:
    """Settings of a step on this machine: its numerics, with the recorded configuration if the step is repeated."""
    if recorded is None:
        return now
    return {**now, "configuration": recorded["settings"]["configuration"]}


def check_trainer_fits(version: int, recorded: StepMetrics, now: StepSettings) -> None:
    """Raise TrainerError if this trainer was built with other settings than a step."""
    then, here = (dict(_flat(each["configuration"])) for each in (recorded["settings"], now))
    for path in then.keys() & here.keys():
        moved = path in MAY_MOVE and None not in (then[path], here[path])
        if then[path] != here[path] and not moved and not path.startswith(NOT_BUILT_IN):
            raise TrainerError(
                f"step {version} was made with {path} = {then[path]!r}, this trainer was built with {here[path]!r}",
                remedy="replay the iterations before and after the change separately",
            )


def check_replayed(index: int, recorded: StepMetrics, again: StepMetrics, *, exact: bool) -> None:
    """Raise ReplayedStepError if a repeated step has another loss or gradient norm than the recorded one.

    index: of the iteration. exact: whether they must be equal bit for bit; else within a tolerance.
    """
    for name in ("loss", "grad_norm"):
        before, now = _figure(recorded, name), _figure(again, name)
        if before == now or (not exact and _near(name, before, now, again)):
            continue
        raise ReplayedStepError(
            f"iteration {iteration_number(index)}, step {recorded['version']}: made again, {name} is {now!r}, recorded is {before!r}",
            remedy="put back what changed since (the batch, the model's files, your functions, package versions), or continue without the steps after a checkpoint: `millrace branch RUN NEW --at ITERATION`",
        )


def is_exact(recorded: StepMetrics, again: StepMetrics) -> bool:
    """Whether a repeated step must be equal bit for bit: on a CPU, under the same numerics."""
    then, now = recorded["settings"]["numerics"], again["settings"]["numerics"]
    return then == now and now.get("device") == "cpu" and bool(now.get("deterministic"))


def _near(name: str, before: float, now: float, again: StepMetrics) -> bool:
    absolute, relative = LOSS_TOLERANCE if name == "loss" else NORM_TOLERANCE
    coarse = again["settings"]["numerics"].get("dtype") == "bfloat16"
    factor = BFLOAT16_FACTOR if coarse else 1.0
    return abs(now - before) <= factor * (absolute + relative * abs(before))


def _figure(step: StepMetrics, name: str) -> float:
    figures: Mapping[str, Any] = step
    return float(figures[name])


def with_settings(config: RunConfig, recorded: StepMetrics) -> RunConfig:
    """The configuration under which a recorded step was made."""
    values = config.model_dump(mode="json")
    return RunConfig.model_validate(
        values | _laid_over(config, values, recorded["settings"]["configuration"])
    )


def _laid_over(section: BaseModel, values: dict[str, Any], over: Mapping[str, Any] | None) -> dict[str, Any]:
    """A section's `values`, with fields that only a branch may change taken from `over`; without `over` only these fields."""
    made: dict[str, Any] = {} if over is None else dict(values)
    for name, field in type(section).model_fields.items():
        if name not in values or (over is not None and name not in over):
            continue
        restart, below = restart_of(field), getattr(section, name)
        if restart is None and isinstance(below, BaseModel):
            made[name] = _laid_over(below, values[name], None if over is None else over[name])
        elif restart is not None and restart.branch and not restart.resume:
            made[name] = values[name] if over is None else over[name]
    return made


def _flat(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, Mapping) and values:
        for name, value in values.items():
            yield from _flat(value, f"{path}.{name}" if path else name)
    else:
        yield path, values
