"""Which fields of a configuration have no effect in its run, and why. Pure.

A field that is set and ignored is no error: `millrace check` names it with the reason. Contradictions are refused by
millrace.core.config.rules. A test computes this table for every field in every mode.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.engine_kinds import SGLANG
from millrace.core.config.evaluation import EvalSet
from millrace.core.config.plan.layout import Layout
from millrace.core.config.rollout import Sampling
from millrace.core.config.run_config import RunConfig

SOURCE, HELD_OUT = "data.sources.*", "evaluation.sets.*"


@dataclass(frozen=True)
class IdleFields:
    """Fields without effect under a condition. A name includes everything below it."""

    because: str
    when: Callable[[RunConfig], bool]
    fields: str
    but: str = ""  # exceptions below them, which act nevertheless


@dataclass(frozen=True)
class IdleOfItem:
    """Fields of a source or held-out set without effect under a condition."""

    because: str
    when: Callable[[RunConfig, Any], bool]  # the item is a Source or an EvalSet, as `of` says
    of: str  # SOURCE or HELD_OUT
    fields: str


def _trains_nothing(config: RunConfig) -> bool:
    return config.pipeline.rollouts_only


def _takes_rollouts(config: RunConfig) -> bool:
    return config.pipeline.rollouts_from is not None


def _supervised(config: RunConfig) -> bool:
    return config.algorithm.supervised


def _ratio_is_one(config: RunConfig) -> bool:
    """Whether each iteration has one step, whose old log-probabilities are the trainer's own."""
    a = config.algorithm
    return a.loss.kind != "function" and a.old_logprobs != "rollout" and config.steps_per_iteration == 1


def _compiles_nothing(config: RunConfig) -> bool:
    trains = config.trainer.device != "cpu" and not _trains_nothing(config)
    serves = not _supervised(config) and not _takes_rollouts(config) and SGLANG in config.engines.kinds
    return not trains and not serves


def _guard_is_off(config: RunConfig) -> bool:
    """Whether no ratio is taken against the trainer's own log-probabilities by a loss of millrace."""
    a = config.algorithm
    return a.loss.kind == "function" or (a.old_logprobs == "rollout" and a.loss.kind != "reinforce")


def _every_own_reward(config: RunConfig) -> bool:
    own = [
        *(source.reward for source in config.data.sources),
        *(held.reward for held in config.evaluation.sets),
    ]
    return None not in own


SCHEDULE = "decay_steps min_lr"
NOT_DRAWN_BY = "algorithm.loss=sft generates nothing"
IDLE: tuple[IdleFields | IdleOfItem, ...] = (
    # supervised training
    IdleFields(
        NOT_DRAWN_BY,
        _supervised,
        "rollout engines sync placement.colocate placement.offload_engines placement.offload_trainer "
        "placement.task_runner pipeline.max_staleness pipeline.reserve pipeline.on_update",
        but="rollout.prompts rollout.samples_per_prompt rollout.sampling.max_new_tokens",
    ),
    IdleFields(
        "with sync.lora=names each request keeps its adapter, and no engine pauses",
        lambda config: config.adapters_by_name,
        "pipeline.on_update",
    ),
    IdleFields("algorithm.loss=sft scores and filters nothing", _supervised, "reward filter"),
    IdleFields(
        "the loss of reference answers takes no other term",
        _supervised,
        "algorithm",
        but="algorithm.preset algorithm.loss algorithm.aggregation algorithm.constant_length",
    ),
    IdleFields(
        "algorithm.loss=sft has no rewards to follow",
        _supervised,
        "data.stages.*.reward data.stages.*.groups",
    ),
    IdleOfItem(
        "algorithm.loss=sft has no rewards to follow",
        lambda config, _: _supervised(config),
        SOURCE,
        "reward pools levels.last levels.window levels.raise_from levels.groups",
    ),
    IdleOfItem(
        "a held-out loss is of the reference answers",
        lambda config, _: _supervised(config),
        HELD_OUT,
        "reward sampling samples_per_prompt correct_from",
    ),
    IdleFields(
        "algorithm.loss=sft has no samples to show", _supervised, "tracking.samples tracking.rollout_traces"
    ),
    IdleOfItem(
        "loss_on trains what the dialogue itself holds",
        lambda config, source: _supervised(config) and source.loss_on != "answer",
        SOURCE,
        "label_key",
    ),
    IdleOfItem(
        "loss_on trains what the dialogue itself holds",
        lambda config, held_out: _supervised(config) and held_out.loss_on != "answer",
        HELD_OUT,
        "label_key",
    ),
    # rollouts without a trainer, and a trainer without rollouts
    IdleFields(
        "pipeline.rollouts_only trains nothing",
        _trains_nothing,
        "trainer checkpoint sync algorithm.loss algorithm.old_logprobs algorithm.correction algorithm.aggregation "
        "algorithm.constant_length algorithm.whiten algorithm.kl_coef algorithm.kl_kind algorithm.kl_placement "
        "algorithm.kl_unbiased algorithm.kl_target algorithm.kl_horizon algorithm.reference "
        "algorithm.reference_update_steps algorithm.entropy_coef algorithm.on_policy_guard algorithm.teacher "
        "algorithm.advantage.gamma algorithm.advantage.lam algorithm.advantage.critic",
        # the type of the weights follows from the device, the numbers of weight versions from the steps
        but="trainer.device trainer.global_batch trainer.passes sync.directory",
    ),
    IdleFields(
        "no trainer reads a teacher with pipeline.rollouts_only",
        lambda config: _trains_nothing(config) and config.algorithm.teacher_server is None,
        "algorithm.distillation_coef",
    ),
    IdleFields(
        "with pipeline.rollouts_from samples and rewards come from the other run",
        _takes_rollouts,
        # fields of these sections that are not listed must be as in the other run
        "rollout.max_concurrency rollout.admission rollout.shards rollout.part_groups rollout.flush_tokens rollout.progress_timeout_s "
        "rollout.attempts rollout.max_failed_share rollout.session.workers rollout.session.timeout_s "
        "rollout.session.rollout_timeout_s rollout.session.memory_mb rollout.session.max_processes "
        "rollout.session.max_rollouts rollout.session.max_calls reward.workers reward.concurrency reward.timeout_s "
        "reward.memory_mb reward.max_processes reward.max_failed_share algorithm.teacher_server.url "
        "algorithm.teacher_server.protocol algorithm.teacher_server.key algorithm.teacher_server.concurrency "
        "algorithm.teacher_server.timeout_s algorithm.teacher_server.attempts algorithm.teacher_server.same_tokenizer "
        "filter.refill_factor filter.oversample",
    ),
    IdleFields(
        "with pipeline.rollouts_from no engine starts",
        _takes_rollouts,
        "engines sync placement.task_runner",
    ),
    # options of what is off
    IdleFields(
        "with pipeline.select=draw no group is deferred, and no token older than pipeline.ahead and sync_every make it",
        lambda config: config.pipeline.select == "draw",
        "pipeline.max_staleness",
    ),
    IdleFields(
        "with pipeline.select=draw an iteration begins with the groups of its batch",
        lambda config: config.pipeline.select == "draw",
        "pipeline.reserve",
    ),
    IdleFields(
        "with pipeline.ahead=0 no request is under way when weights change",
        lambda config: config.pipeline.ahead == 0,
        "pipeline.on_update",
    ),
    IdleFields(
        "placement.colocate is false, so that engines and trainer share no memory",
        lambda config: not config.placement.colocate,
        "placement.offload_engines placement.offload_trainer",
    ),
    IdleFields(
        "no part compiles kernels: ranks are on the CPU, and no engine is SGLang's",
        _compiles_nothing,
        "placement.kernel_cache",
    ),
    IdleFields(
        "sync.kind=auto sends weights by disk here",
        lambda config: config.sync_kind == "disk",
        "sync.bucket_mib",
    ),
    IdleFields(
        "no filter.group_filter is named",
        lambda config: config.filter.group_filter is None,
        "filter.max_failed_share",
    ),
    IdleFields(
        "each source and each held-out set has its own reward",
        _every_own_reward,
        "reward.function reward.options reward.group",
    ),
    IdleFields(
        "rollout.buffer.choose is not stratified",
        lambda config: config.rollout.buffer is not None and config.rollout.buffer.choose != "stratified",
        "rollout.buffer.strata",
    ),
    IdleFields(
        "algorithm.kl_coef is 0",
        lambda config: config.algorithm.kl_coef == 0,
        "algorithm.kl_kind algorithm.kl_placement algorithm.kl_unbiased algorithm.kl_horizon",
    ),
    IdleFields(
        "without algorithm.kl_target the coefficient does not change",
        lambda config: config.algorithm.kl_target is None,
        "algorithm.kl_horizon",
    ),
    IdleFields(
        "algorithm.aggregation is not constant",
        lambda config: config.algorithm.aggregation != "constant",
        "algorithm.constant_length",
    ),
    IdleFields(
        "algorithm.loss=reinforce has no ratio",
        lambda config: config.algorithm.loss.kind == "reinforce",
        "algorithm.old_logprobs",
    ),
    IdleFields(
        "no ratio is taken that must be 1 at an iteration's first step",
        _guard_is_off,
        "algorithm.on_policy_guard",
    ),
    IdleFields(
        "an iteration has one step, at which the ratio is 1",
        _ratio_is_one,
        "algorithm.loss.clip_low algorithm.loss.clip_high algorithm.loss.dual_clip",
    ),
    IdleFields(
        "a function in algorithm.loss weighs its tokens itself",
        lambda config: config.algorithm.loss.kind == "function",
        "algorithm.correction algorithm.old_logprobs",
        but="algorithm.correction.max_token_age algorithm.old_logprobs",
    ),
    IdleFields(
        "algorithm.advantage.divide_by_std is false",
        lambda config: not getattr(config.algorithm.advantage, "divide_by_std", True),
        "algorithm.advantage.epsilon",
    ),
    IdleFields(
        "the rate does not decay with kind=constant",
        lambda config: config.trainer.schedule.kind == "constant",
        " ".join(f"trainer.schedule.{name}" for name in SCHEDULE.split()),
    ),
    IdleFields(
        "the critic's rate does not decay with kind=constant",
        lambda config: (
            (critic := config.algorithm.critic) is not None
            and critic.schedule is not None
            and critic.schedule.kind == "constant"
        ),
        " ".join(f"algorithm.advantage.critic.schedule.{name}" for name in SCHEDULE.split()),
    ),
    IdleFields(
        "evaluation.sets is empty",
        lambda config: not config.evaluation.sets,
        "evaluation.every evaluation.background",
    ),
    IdleFields(
        "mlflow is not among tracking.trackers",
        lambda config: "mlflow" not in config.tracking.trackers,
        "tracking.system_metrics tracking.rollout_traces",
    ),
    IdleFields("tracking.trackers is empty", lambda config: not config.tracking.trackers, "run.experiment"),
    IdleFields(
        "no source is a file",
        lambda config: all(source.rows is not None for source in config.data.sources),
        "data.stream_above_rows",
    ),
    IdleFields(
        "without engines.router millrace starts no server beside external engines",
        lambda config: not config.engines.started and config.engines.router is None,
        "engines.host",
    ),
    IdleFields(
        "external engines have their own GPUs, whose number only sync.kind=broadcast needs",
        lambda config: not config.engines.started and config.sync_kind != "broadcast",
        "engines.gpus",
    ),
    IdleOfItem(
        "it is the only source",
        lambda config, _: len(config.data.sources) == 1,
        SOURCE,
        "weight",
    ),
    IdleOfItem("data.stages has the weights", lambda config, _: bool(config.data.stages), SOURCE, "weight"),
    IdleOfItem(
        "label_from_prompt takes the answer from the prompt",
        lambda _, source: source.label_from_prompt,
        SOURCE,
        "label_key",
    ),
    IdleOfItem(
        "label_from_prompt takes the answer from the prompt",
        lambda _, held_out: held_out.label_from_prompt,
        HELD_OUT,
        "label_key",
    ),
    IdleOfItem(
        "one sample a prompt has neither pass@k nor a majority",
        lambda _, held_out: held_out.samples_per_prompt < 2,
        HELD_OUT,
        "correct_from",
    ),
)


@dataclass(frozen=True)
class NoEffect:
    """A field that is set without effect."""

    field: str
    because: str


def no_effect(config: RunConfig, layout: Layout | None = None) -> list[NoEffect]:
    """The fields that are set to other values than their defaults and have no effect, in the order of the sections.

    layout: of the run; it tells what engines.kind=auto is.
    """
    return [
        NoEffect(path, reason)
        for path in set_fields(config)
        if (reason := idle_because(config, path, layout)) is not None
    ]


def idle_because(config: RunConfig, path: str, layout: Layout | None = None) -> str | None:
    """Why a field acts on nothing, the first reason of the table; None if it acts. path: items of lists by their numbers."""
    if layout is not None and config.generates:
        others = (kind.fields for kind in config.engines.kinds if kind is not layout.engine_kind)
        if _is_among(path, " ".join(others)):
            return f"engines.kind={config.engines.kind} is {layout.engine_kind.name} here"
    general = re.sub(r"\.\d+\b", ".*", path)
    for entry in IDLE:
        if isinstance(entry, IdleFields):
            if _is_among(general, entry.fields) and not _is_among(general, entry.but) and entry.when(config):
                return entry.because
        elif general.startswith(f"{entry.of}.") and _is_among(
            general.removeprefix(f"{entry.of}."), entry.fields
        ):
            items = config.data.sources if entry.of == SOURCE else config.evaluation.sets
            number = int(path.split(".")[2])
            if entry.when(config, items[number]):
                return entry.because
    return None


def set_fields(config: RunConfig) -> Iterator[str]:
    """The paths of the fields that are not at their defaults. Defaults of `algorithm` are its preset's."""
    sections = {name: getattr(config, name) for name in RunConfig.model_fields}
    defaults = {"algorithm": Algorithm.model_validate({"preset": config.algorithm.preset})}
    yield from _set_below(sections, RunConfig.model_fields, defaults, "", config)


def _set_fields(section: BaseModel, base: Any, above: str, config: RunConfig) -> Iterator[str]:
    """The set fields of a section. base: its defaults; of another type if the section is optional or of another kind."""
    model = type(section)
    usual = {name: getattr(base, name) for name in model.model_fields} if type(base) is model else {}
    if isinstance(section, EvalSet):
        usual["sampling"] = _usual_sampling(section, config)
    if isinstance(base, BaseModel) and type(base) is not model:
        yield f"{above}kind"
    values = {name: getattr(section, name) for name in model.model_fields}
    yield from _set_below(values, model.model_fields, usual, above, config)


def _set_below(
    values: Mapping[str, Any],
    fields: Mapping[str, FieldInfo],
    defaults: Mapping[str, Any],
    above: str,
    config: RunConfig,
) -> Iterator[str]:
    for name, value in values.items():
        usual = defaults[name] if name in defaults else fields[name].get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            yield from _set_fields(value, usual, f"{above}{name}.", config)
        elif value and isinstance(value, list) and all(isinstance(item, BaseModel) for item in value):
            for number, item in enumerate(value):
                yield from _set_fields(item, None, f"{above}{name}.{number}.", config)
        elif value != usual:
            yield f"{above}{name}"


def _usual_sampling(held_out: EvalSet, config: RunConfig) -> Sampling:
    """The sampling of a set that gives none."""
    length = config.rollout.sampling.max_new_tokens
    greedy = held_out.samples_per_prompt == 1
    return Sampling(temperature=0, max_new_tokens=length) if greedy else Sampling(max_new_tokens=length)


def _is_among(path: str, names: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names.split())
