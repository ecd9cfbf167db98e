"""The whole configuration of a run: one pydantic model, the flow's single parameter. No torch, no I/O."""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import model_validator

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.checkpoint import Checkpoint
from millrace.core.config.data import Data
from millrace.core.config.engines import AutoEngines, Engines
from millrace.core.config.evaluation import Evaluation
from millrace.core.config.filter import Filter
from millrace.core.config.model import Model
from millrace.core.config.model_preset import preset_values
from millrace.core.config.parts.from_preset import EMPTY_IN_FORMS, given_values, merged
from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.restart import ANY_START, in_a_branch
from millrace.core.config.parts.section import Section
from millrace.core.config.pipeline import Pipeline
from millrace.core.config.placement import Placement
from millrace.core.config.reward import AS_THE_REWARD, RewardSection
from millrace.core.config.rollout import Rollout, Sampling
from millrace.core.config.run import Run
from millrace.core.config.storage import Storage
from millrace.core.config.sync import AutoSync, Sync
from millrace.core.config.tracking import Tracking
from millrace.core.config.trainer import Trainer
from millrace.core.waits import POLLS, Limit


class RunConfig(Section):
    """Everything that decides what a run does."""

    model_config = EMPTY_IN_FORMS

    run: Run
    model: Model
    data: Data
    storage: Annotated[Storage, ANY_START] = Storage()
    rollout: Rollout = Rollout()
    reward: Annotated[RewardSection, AS_THE_REWARD] = RewardSection()
    filter: Annotated[Filter, in_a_branch("an open iteration may hold groups that it judged")] = Filter()
    algorithm: Annotated[Algorithm, in_a_branch("one run has one algorithm")] = Algorithm()
    trainer: Trainer = Trainer()
    engines: Annotated[Engines, ANY_START] = AutoEngines()
    placement: Annotated[Placement, ANY_START] = Placement()
    pipeline: Annotated[Pipeline, ANY_START] = Pipeline()
    sync: Annotated[Sync, ANY_START] = AutoSync()
    checkpoint: Annotated[Checkpoint, ANY_START] = Checkpoint()
    evaluation: Annotated[Evaluation, ANY_START] = Evaluation()
    tracking: Annotated[Tracking, ANY_START] = Tracking()

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        given = given_values(values, cls)
        return merged(preset_values(given), given, cls)

    @model_validator(mode="before")
    @classmethod
    def _held_out_sampling(cls, values: Any) -> Any:
        """Held-out sets have the rollout's length, and greedy sampling with one answer a prompt, unless they set it."""
        sets = _at(values, "evaluation", "sets")
        if not isinstance(sets, list):
            return values
        length = _at(values, "rollout", "sampling", "max_new_tokens")
        usual = {"max_new_tokens": length} if isinstance(length, int) else {}
        filled = [_with_sampling(held_out, usual) for held_out in sets]
        return {**values, "evaluation": {**values["evaluation"], "sets": filled}}

    def problem(self, field: str, reason: str, remedy: str) -> Problem:
        """A problem of a field, with its value; a section stands as its kind, or as `set`."""
        value = attrgetter(field)(self)
        return Problem(
            field, getattr(value, "kind", "set") if isinstance(value, Section) else value, reason, remedy
        )

    def for_actors(self) -> dict[str, Any]:
        """The configuration for actors, with absolute paths, since actors have another working folder."""
        settings = self.model_dump(mode="json")
        for section, name in (
            ("model", "path"),
            ("storage", "root"),
            ("algorithm", "teacher"),
            ("sync", "directory"),
            ("placement", "kernel_cache"),
        ):
            if settings[section][name] is not None and "://" not in settings[section][name]:
                settings[section][name] = os.path.abspath(os.path.expanduser(settings[section][name]))
        lora = settings["trainer"]["lora"]
        if lora and lora["path"] is not None:
            lora["path"] = os.path.abspath(lora["path"])
        settings["run"]["import_from"] = [*map(os.path.abspath, self.run.import_from), os.getcwd()]
        return settings

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """The type of the weights: model.dtype, and float32 as long as auto is not resolved."""
        return "float32" if self.model.dtype == "auto" else self.model.dtype

    def with_dtype(self, dtype: Literal["float32", "bfloat16"]) -> RunConfig:
        """The configuration with `auto` replaced by a type; any other type stays."""
        if self.model.dtype != "auto":
            return self
        return self.model_copy(update={"model": self.model.model_copy(update={"dtype": dtype})})

    @property
    def part_limit(self) -> Limit:
        """How long a call to a live part may make no progress."""
        return Limit(self.run.progress_timeout_s)

    @property
    def run_limit(self) -> Limit:
        """How long the driver waits for its own work without progress anywhere in the run.

        Longer than the limit of a part, so that the part's limit is reported first.
        """
        generated = self.rollout.attempts * (
            self.rollout.progress_timeout_s * (1 + 1 / POLLS) + self.engines.start_timeout_s
        )
        session, teacher = self.rollout.session, self.algorithm.teacher_server
        scored = 2 * self.reward.timeout_s + (teacher.attempts * teacher.timeout_s if teacher else 0)
        silent = generated + scored + (session.rollout_timeout_s if session else 0) + self.placement.wait_s
        return Limit(self.part_limit.seconds * (1 + 1 / POLLS) + silent)

    @property
    def samples_per_iteration(self) -> int:
        """Samples that one iteration trains on: prompts × n."""
        return self.rollout.prompts * self.rollout.samples_per_prompt

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.trainer.global_batch or self.samples_per_iteration

    @property
    def steps_per_pass(self) -> int:
        """Optimizer steps that train an iteration's batch once."""
        return self.samples_per_iteration // self.global_batch

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps that one iteration makes."""
        return self.trainer.passes * self.steps_per_pass

    @property
    def trains_images(self) -> bool:
        """Whether prompts that the trainer is given may have pictures."""
        given = (*self.data.sources, *(self.evaluation.sets if self.algorithm.supervised else ()))
        return any(source.images_key for source in given)

    @property
    def generates(self) -> bool:
        """Whether the run has engines."""
        return not self.algorithm.supervised and self.pipeline.rollouts_from is None

    @property
    def samplings(self) -> list[tuple[str, Sampling]]:
        """Every sampling that engines get requests for, by its field."""
        sets = self.evaluation.sets
        return [
            ("rollout.sampling", self.rollout.sampling),
            *((f"evaluation.sets.{e.name}.sampling", e.sampling) for e in sets),
        ]

    @property
    def evaluates_in_background(self) -> bool:
        """Whether an iteration evaluates the weights that it starts with, beside its own work, not the ones it makes."""
        wanted = self.evaluation.background
        return not self.algorithm.supervised and (self.pipeline.ahead > 0 if wanted is None else wanted)

    @property
    def saves_in_background(self) -> bool:
        """Whether iterations continue while their checkpoints are written."""
        wanted = self.checkpoint.background
        return self._on_gpus if wanted is None else wanted

    @property
    def response_budgets(self) -> dict[str, int]:
        """Most tokens after a prompt, by the field that sets it."""
        # held-out sets too are answered in sessions
        if self.rollout.session:
            return {self.rollout.longest_response_field: self.rollout.longest_response}
        return {f"{field}.max_new_tokens": sampling.max_new_tokens for field, sampling in self.samplings}

    @property
    def data_parallel(self) -> int:
        """Data parallel size: what tensor, pipeline and context parallelism leave of the world."""
        p = self.trainer.parallel
        return self.trainer.world_size // (p.tensor * p.pipeline * p.context)

    @property
    def engines_sleep(self) -> bool:
        """Whether engines release their GPU memory while the trainer works."""
        return self.placement.colocate and self.placement.offload_engines

    @property
    def trainer_offloads(self) -> bool:
        """Whether the trainer leaves GPU memory to engines while they take new weights and generate."""
        return self.placement.colocate and self.placement.offload_trainer

    @property
    def sync_kind(self) -> Literal["disk", "ipc", "broadcast"]:
        """How weights reach the engines: sync.kind, or what auto takes."""
        if self.sync.kind != "auto":
            return self.sync.kind
        if self.placement.colocate:
            return "ipc"
        return "broadcast" if self._on_gpus else "disk"

    @property
    def adapters_by_name(self) -> bool:
        """Whether engines serve the adapters of trainer.lora by name, beside the model's weights."""
        trains = self.trainer.lora is not None and not self.pipeline.rollouts_only
        return trains and self.sync.lora == "names"

    @property
    def adapter_slots(self) -> int:
        """Adapters that an engine holds at once: of each version that requests may have, and the next."""
        return self.pipeline.staleness + 2 if self.adapters_by_name else 0

    @property
    def compares_texts(self) -> bool:
        """Whether engines and trainer are compared on fixed texts after a sync. Engines score them at temperature 1 alone."""
        by_name = self.adapters_by_name and self.rollout.sampling.temperature == 1
        return by_name or self.sync.max_prompt_gap is not None

    @property
    def _on_gpus(self) -> bool:
        """Whether trainer and engines work on GPUs, as far as a configuration tells."""
        return all(kind.runs_on == "gpu" for kind in self.engines.kinds) and self.trainer.device != "cpu"


def _at(values: Any, *path: str) -> Any:
    """A value within mappings; None if it is not given, or if a value above it is no mapping."""
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _with_sampling(held_out: Any, usual: Mapping[str, Any]) -> Any:
    """A set with the usual sampling for the sampling fields that it does not give.

    Several answers to a prompt are drawn at temperature 1: greedy ones would all be the same.
    """
    sampling = held_out.get("sampling", {}) if isinstance(held_out, Mapping) else None
    if not isinstance(sampling, Mapping):
        return held_out
    greedy = {"temperature": 0} if held_out.get("samples_per_prompt", 1) == 1 else {}
    return {**held_out, "sampling": {**greedy, **usual, **sampling}}
