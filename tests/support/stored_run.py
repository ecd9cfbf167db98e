"""A small run written by hand: two committed iterations and one that is amid its rewards, with evaluations of two sets."""

from __future__ import annotations

import json
from typing import Any

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import VERSION
from millrace.core.contracts import schema
from millrace.core.contracts.sample import (
    BatchSample,
    DrawnGroup,
    EvaluatedSample,
    GeneratedSample,
    JudgedSample,
    SampleLogprobs,
    ScoredSample,
)
from millrace.core.replay import settings_of
from tests.support.stored_samples import sample_of

SYSTEM = "Be brief. It's a sum."
MESSAGES = [
    {"role": "system", "content": "Think."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+3="},
]
CONFIG: dict[str, Any] = {
    "run": {"name": "a", "iterations": 4},
    "model": {"path": "model"},
    "data": {
        "sources": [
            {"name": "sums", "path": "sums.jsonl", "system": SYSTEM},
            {"name": "chats", "path": "chats.jsonl"},
        ]
    },
    "rollout": {"prompts": 2, "samples_per_prompt": 2},
    "evaluation": {"sets": [{"name": "easy", "path": "e", "system": SYSTEM}, {"name": "hard", "path": "h"}]},
}
PROMPTS = {"sums": json.dumps("1+2="), "chats": json.dumps(MESSAGES)}


def write_run(root: str, name: str = "a") -> RunFolder:
    """Write the run; returns its folder."""
    folder = RunFolder(root, name)
    config = RunConfig.model_validate({**CONFIG, "run": {**CONFIG["run"], "name": name}})
    record = {
        "name": name,
        "config": config.model_dump(mode="json"),
        "config_version": VERSION,
        "mlflow_run_id": "m",
        "attempts": [{"started": "2026-01-02T03:04:05+00:00", "flow_run_url": "http://host/runs/flow-run/1"}],
        "versions": {"python": "3.12"},
    }
    folder.store.write_sealed("run.json", record)
    _evaluate(folder, 0, "evaluate_before")
    for index in range(2):
        _commit(folder, index)
    opened = folder.iteration(2)
    drawn = _groups(2)
    record_task(
        opened,
        "sample_prompts",
        {"files": [write_rows(opened, "prompts", drawn)], "groups": 2, "by_source": {}},
    )
    samples = [sample for group in drawn for sample in _samples(group)]
    write_part(opened, "rollouts", schema.to_table(samples, "rollouts"), "rollouts")
    write_part(opened, "rewards", schema.to_table(_scores(samples, failing=True), "rewards"), "rewards")
    return folder


def _commit(folder: RunFolder, index: int) -> None:
    store, drawn = folder.iteration(index), _groups(index)
    samples = [sample for group in drawn for sample in _samples(group)]
    scores = _scores(samples)
    verdicts = [
        JudgedSample(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            prompt_id=sample.prompt_id,
            verdict="kept" if sample.source == "sums" else "dropped",
            reason=None if sample.source == "sums" else "zero_variance",
            train_step=index + 1 if sample.source == "sums" else None,
            dropped_by=None if sample.source == "sums" else "zero_variance",
        )
        for sample in samples
    ]
    batch = [
        BatchSample(
            **{name: getattr(sample, name) for name in GeneratedSample.__slots__},
            reward=score.reward,
            reward_parts=score.reward_parts,
            reward_texts=score.reward_texts,
            answer=score.answer,
            scoring=score.scoring,
            verdict="kept",
            shaped_reward=score.reward,
            advantage=0.5 - sample.index,
            train_step=index + 1,
        )
        for sample, score in zip(samples, scores, strict=True)
        if sample.source == "sums"
    ]
    logprobs = [
        SampleLogprobs(
            sample_id=sample.sample_id,
            train_step=sample.train_step,
            trainer_logprobs=[value + 0.5 for value in sample.rollout_logprobs],
        )
        for sample in batch
    ]
    step = {
        "version": index + 1,
        "samples": len(batch),
        "loss": 0.5 / (index + 1),
        "grad_norm": 1.0,
        "lr": 1e-3,
        "logprob_gap_mean": 1e-6,
        "settings": settings_of(RunConfig.model_validate(CONFIG), {"device": "cpu"}),
    }
    files = [
        write_rows(store, "prompts", drawn),
        write_rows(store, "verdicts", verdicts),
        write_rows(store, "batch", batch),
        store.write_json("step.json", {"version": index + 1, "steps": [step]}).record(),
        write_part(store, "rollouts", schema.to_table(samples, "rollouts"), "rollouts").record(),
        write_part(store, "rewards", schema.to_table(scores, "rewards"), "rewards").record(),
        store.write_table(
            "logprobs/rank-00000.parquet", schema.to_table(logprobs, "logprobs"), "logprobs"
        ).record(),
    ]
    metrics = {"reward/mean": 0.5, "train/loss": step["loss"]}
    tasks = ["evaluate_before"] if index == 0 else ["evaluate"]
    if index == 1:
        metrics |= {
            f"eval/{name}/reward_mean": value for name, value in _evaluate(folder, 2, "evaluate").items()
        }
    entries = [*files, *(store.entry(record_path(task)).record() for task in tasks)]
    content = {
        "iteration": index,
        "files": entries,
        "tasks": {"trained_version": index + 1, "metrics": metrics},
    }
    folder.commit_manifest(index, Manifest.model_validate(content))


def _evaluate(folder: RunFolder, done: int, task: str) -> dict[str, float]:
    """Evaluate both sets after `done` iterations; returns the means."""
    means, sets = {}, {}
    for name, right in (("easy", done > 0), ("hard", False)):
        rows = [
            EvaluatedSample(
                set=name,
                prompt_id=f"{name}-{number}",
                index=0,
                prompt=json.dumps(f"{number}+1="),
                label=json.dumps(str(number + 1)),
                response=str(number + 1),
                response_length=1,
                status="completed",
                reward=float(right or number == 0),
                scoring="scored",
                version=done,
                subset=None,
                reason=None,
            )
            for number in range(2)
        ]
        path = f"eval/{name}/{done:06d}.parquet"
        entry = folder.store.write_table(path, schema.to_table(rows, "evaluations"), "evaluations")
        means[name] = sum(row.reward or 0.0 for row in rows) / 2
        sets[name] = {"file": entry.record(), "reward_mean": means[name], "samples": 2, "not_scored": 0}
    record_task(
        folder.iteration(max(done - 1, 0)),
        task,
        {"version": done, "done": done, "sets": sets, "seconds": 1.0},
    )
    return means


def record_task(store: Store, task: str, result: dict[str, Any]) -> None:
    """Write a task's record."""
    store.write_sealed(record_path(task), {"result": json.dumps(result)})


def write_rows(store: Store, kind: str, rows: list[Any]) -> Any:
    """Write a table; returns its record in a manifest."""
    return store.write_table(f"{kind}.parquet", schema.to_table(rows, kind), kind).record()


def _groups(index: int) -> list[DrawnGroup]:
    return [
        DrawnGroup(
            group_id=f"{source}-{index}",
            prompt_id=source,
            iteration=index,
            source=source,
            row=0,
            epoch=index,
            ordinal=ordinal,
            prompt=PROMPTS[source],
            prompt_tokens=[1, 2, 3],
            label=json.dumps("3") if source == "sums" else json.dumps({"value": 5}),
            metadata=json.dumps({"level": 1}) if source == "sums" else None,
        )
        for ordinal, source in enumerate(PROMPTS)
    ]


def _samples(group: DrawnGroup) -> list[GeneratedSample]:
    return [
        sample_of(
            group,
            index,
            str(3 + index),
            policy_versions=[{"first_token": 0, "version": group.iteration}],
            status="completed" if index else "truncated",
            timings=[("generate", 0.1)],
        )
        for index in range(2)
    ]


def _scores(samples: list[GeneratedSample], failing: bool = False) -> list[ScoredSample]:
    """Of each group the first sample is right; with `failing` no second one can be scored."""
    scored = []
    for sample in samples:
        fails = failing and sample.index == 1
        reward = None if fails else float(sample.index == 0 and sample.source == "sums")
        scored.append(
            ScoredSample(
                sample_id=sample.sample_id,
                group_id=sample.group_id,
                reward=reward,
                reward_parts=[] if reward is None else [("exact", reward), ("format", 1.0)],
                scoring="failed" if fails else "scored",
                reason="KeyError: 'answer'" if fails else None,
                scoring_s=0.01,
                reward_texts=None if reward is None else [("words", f"It is {reward:g}.")],
                answer=None if reward is None else sample.response,
            )
        )
    return scored
