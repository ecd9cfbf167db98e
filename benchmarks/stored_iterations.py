"""Iterations of a tiny run that the project's own writers store, without engines and without a trainer."""

from __future__ import annotations

import json
import time
from typing import Any

from millrace.connectors.storage.iteration_files import manifest_from_records, record_path
from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.run_folder import RECORD, RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.accounts.ledger import Draw, Ledger
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import VERSION
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.rows.prompts import SourceFingerprint
from millrace.core.contracts.sample import (
    BatchSample,
    DrawnGroup,
    GeneratedSample,
    JudgedSample,
    ScoredSample,
)
from millrace.tasks.reporting.pictures import Curves

METRICS = 60  # figures of an iteration beside those that are named
FIGURE = 1 / 7  # what they grow by


class StubRun:
    """A run of one source. What its driver holds from iteration to iteration is here: folder, ledger and curves."""

    SEED, ROWS, PROMPTS, RESERVE, SAMPLES = 7, 1000, 2, 0, 2

    def __init__(self, root: str, name: str) -> None:
        self.folder = RunFolder(root, name)
        self.ledger, self.curves = Ledger(self.SEED, self.plans()), Curves()
        self._run_id = f"id-of-{name}"
        if not self.folder.store.exists(RECORD):
            self.folder.store.write_sealed(RECORD, self._record(name))
        self.folder.owner.drive_as(self._run_id)

    @classmethod
    def plans(cls) -> dict[str, tuple[float, int]]:
        """What the ledger draws from."""
        return {"sums": (1.0, cls.ROWS)}

    def _record(self, name: str) -> dict[str, Any]:
        config = RunConfig.model_validate(
            {
                "run": {"name": name, "iterations": 1_000_000, "seed": self.SEED},
                "model": {"path": "none"},
                "data": {"sources": [{"name": "sums", "path": "none.jsonl"}]},
                "rollout": {"prompts": self.PROMPTS, "samples_per_prompt": self.SAMPLES},
            }
        )
        source = SourceFingerprint.of("none.jsonl", 1, "0" * 64, self.ROWS, [])
        source = source.model_copy(update={"usable": self.ROWS})
        return {
            "id": self._run_id,
            "name": name,
            "config": config.model_dump(mode="json"),
            "config_version": VERSION,
            "mlflow_run_id": None,
            "attempts": [],
            "data": [{"since": 0, "sources": {"sums": source.model_dump(mode="json")}}],
        }

    def iterate(self, index: int) -> None:
        """Draw, store and commit an iteration, and take it up as the driver does."""
        drawn = self.ledger.extend(self.folder.history(self.ledger.iterations)).draw(
            index, self.PROMPTS, self.RESERVE
        )
        store, groups = self.folder.iteration(index), [_group(index, draw) for draw in drawn]
        samples = [_sample(group, number) for group in groups for number in range(self.SAMPLES)]
        scores = [_score(sample) for sample in samples]
        files = {
            "sample_prompts": [_table(store, "prompts", groups)],
            "rollout": [_part(store, "rollouts", samples)],
            "reward": [_part(store, "rewards", scores)],
            "filter": [
                _table(store, "verdicts", [_verdict(sample, index + 1) for sample in samples]),
                _table(store, "batch", [_trained(*pair) for pair in zip(samples, scores, strict=True)]),
            ],
        }
        made = {"version": index + 1, "loss": 1 / (index + 1), "samples": len(samples)}
        step = {"version": index + 1, "steps": [made]}
        files["train_step"] = [store.write_json("step.json", step).record()]
        for task, named in files.items():
            self.keep(store, index, task, {"files": named, **(step if task == "train_step" else {})})
        metrics = {f"train/figure_{number}": index * FIGURE + number for number in range(METRICS)}
        metrics |= {"reward/mean": 1 - 1 / (index + 2), "train/loss": 1 / (index + 1)}
        manifest = self.folder.commit_manifest(
            index, manifest_from_records(self.folder, index, metrics, time.time(), None, self._run_id)
        )
        published = {
            "metrics": metrics,
            "committed": manifest.tasks["committed"],
            "driver": None,
            "run": self._run_id,
            "manifest": manifest.sha256,
        }
        self.keep(store, index, "publish", published)
        self.curves.add(metrics, index + 1)

    def keep(self, store: Store, index: int, task: str, record: dict[str, Any]) -> None:
        """Write the record of a task."""
        place = f"{self.folder.iteration_path(index)}/{record_path(task)}"
        store.write_sealed(record_path(task), {"result": json.dumps(record)}, place, self._run_id)


def _table(store: Store, kind: str, rows: list[Any]) -> Any:
    return store.write_table(f"{kind}.parquet", schema.to_table(rows, kind), kind).record()


def _part(store: Store, kind: str, rows: list[Any]) -> Any:
    return write_part(store, kind, schema.to_table(rows, kind), kind).record()


def _group(index: int, draw: Draw) -> DrawnGroup:
    return DrawnGroup(
        group_id=f"{index:06d}-{draw.ordinal:04d}",
        prompt_id=f"p{draw.row}",
        iteration=index,
        source=draw.source,
        row=draw.row,
        epoch=draw.epoch,
        ordinal=draw.ordinal,
        prompt='"1+1="',
        prompt_tokens=[1, 2],
        label='"2"',
        metadata=None,
    )


def _sample(group: DrawnGroup, number: int) -> GeneratedSample:
    of_group = ("group_id", "prompt_id", "iteration", "source", "prompt", "label", "metadata")
    return GeneratedSample(
        **{name: getattr(group, name) for name in of_group},
        sample_id=sample_id(group.group_id, number),
        index=number,
        tokens=[*group.prompt_tokens, 3, 4],
        response_length=2,
        response="2",
        loss_mask=[1, 1],
        rollout_logprobs=[-0.5, -0.25],
        policy_versions=[{"first_token": 0, "version": group.iteration}],
        engine_id="engine-0",
        seed=number,
        turns=1,
        status="completed",
        reason=None,
        timings=[],
    )


def _score(sample: GeneratedSample) -> ScoredSample:
    return ScoredSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        reward=float(sample.index),
        reward_parts=[],
        scoring="scored",
        reason=None,
        scoring_s=0.0,
    )


def _verdict(sample: GeneratedSample, step: int) -> JudgedSample:
    return JudgedSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt_id=sample.prompt_id,
        verdict="kept",
        reason=None,
        train_step=step,
        group_reward=0.5,
    )


def _trained(sample: GeneratedSample, score: ScoredSample) -> BatchSample:
    return BatchSample(
        **{name: getattr(sample, name) for name in GeneratedSample.__slots__},
        reward=score.reward,
        reward_parts=score.reward_parts,
        scoring=score.scoring,
        verdict="kept",
        shaped_reward=score.reward,
        advantage=sample.index - 0.5,
        train_step=sample.iteration + 1,
    )
