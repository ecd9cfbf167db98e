"""A run written by hand that has something to see in every view: kept, dropped, failed and reused groups, turns with tools, times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.manifests.manifest import Manifest, outcomes
from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import VERSION
from millrace.core.contracts import schema
from millrace.core.contracts.ids import sample_id
from millrace.core.contracts.sample import (
    BatchSample,
    DrawnGroup,
    EvaluatedSample,
    GeneratedSample,
    JudgedSample,
    SampleLogprobs,
    ScoredSample,
)
from millrace.core.contracts.turns import TurnRow
from tests.support.stored_run import record_task, write_rows

NAME = "seen"
START = 1_800_000_000.0  # seconds of the epoch
CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
DIALOGUE = [
    {"role": "user", "content": "2+3="},
    {"role": "assistant", "content": "<think>I need a tool.</think>", "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "It is 5é."},
]
CONFIG: dict[str, Any] = {
    "run": {"name": NAME, "iterations": 3},
    "model": {"path": "model"},
    "data": {"sources": [{"name": "sums", "path": "sums.jsonl", "system": "Be brief."}]},
    "rollout": {"prompts": 2, "samples_per_prompt": 3},
    "evaluation": {"sets": [{"name": "easy", "path": "e"}]},
}


def vocabulary() -> Tokenizer:
    """A token a byte, so that a character may be several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


IDS = vocabulary()


def write_viewed_run(root: str, name: str = NAME, said: Sequence[str] = ("5", "4", "<b>6</b>")) -> RunFolder:
    """Write the run; returns its folder. said: the answers of each kept group's samples."""
    folder = RunFolder(root, name)
    config = RunConfig.model_validate({**CONFIG, "run": {**CONFIG["run"], "name": name}})
    record = {
        "name": name,
        "config": config.model_dump(mode="json"),
        "config_version": VERSION,
        "mlflow_run_id": "m",
        "attempts": [
            {"number": 1, "started": "2027-01-15T08:00:00+00:00", "flow_run_url": "http://host/runs/1"}
        ],
        "versions": {"python": "3.12"},
    }
    folder.store.write_sealed("run.json", record)
    folder.store.write("exports/000001/tokenizer.json", IDS.to_str().encode())
    for index in range(2):
        _commit(folder, index, said)
    opened = folder.iteration(2)
    drawn = _groups(2)[:1]
    record_task(
        opened,
        "sample_prompts",
        {"files": [write_rows(opened, "prompts", drawn)], "groups": 1, "by_source": {}},
    )
    samples = [_sample(drawn[0], at, text) for at, text in enumerate(said)]
    write_part(opened, "rollouts", schema.to_table(samples, "rollouts"), "rollouts")
    write_part(opened, "rewards", schema.to_table(_scores(samples[:1]), "rewards"), "rewards")
    return folder


def _groups(index: int) -> list[DrawnGroup]:
    """Of an iteration: kept, dropped for its rewards, failed to be generated, and given back."""
    return [
        DrawnGroup(
            group_id=f"{what}{index}",
            prompt_id=what,
            iteration=index,
            source="sums",
            row=number,
            epoch=0,
            ordinal=number,
            prompt=json.dumps("2+3="),
            prompt_tokens=IDS.encode("2+3=").ids,
            label=json.dumps("5"),
            metadata=json.dumps({"level": 1}),
        )
        for number, what in enumerate(("kept", "same", "lost", "spare"))
    ]


def _sample(group: DrawnGroup, index: int, text: str, **changes: Any) -> GeneratedSample:
    ids = IDS.encode(text).ids
    sample = GeneratedSample(
        **group.of_sample(index),
        sample_id=sample_id(group.group_id, index),
        tokens=[*group.prompt_tokens, *ids],
        response_length=len(ids),
        response=text,
        loss_mask=[1] * len(ids),
        rollout_logprobs=[-0.25 * (at + 1) for at in range(len(ids))],
        policy_versions=[{"first_token": 0, "version": group.iteration}],
        engine_id="engine-0",
        seed=index,
        turns=1,
        status="completed",
        reason=None,
        timings=[("started", START + 100 * group.iteration + index), ("generate_s", 1.5)],
    )
    return replace(sample, **changes)


def _scores(samples: Sequence[GeneratedSample]) -> list[ScoredSample]:
    """The first and the third sample of a group get the reward, also if their answer is another than the label."""
    return [
        ScoredSample(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            reward=None
            if sample.status == "failed"
            else float(sample.index != 1 and sample.group_id[0] == "k"),
            reward_parts=[("exact", float(sample.index != 1)), ("format", 1.0)],
            scoring="skipped" if sample.status == "failed" else "scored",
            reason=None,
            scoring_s=0.1,
            reward_texts=[("words", f"**judged** {sample.response}")],
            answer=sample.response[:20],
        )
        for sample in samples
    ]


def _rollouts(groups: Sequence[DrawnGroup], said: Sequence[str]) -> list[GeneratedSample]:
    kept, same, lost, _ = groups
    turns = "5é."
    talked = _sample(kept, 0, turns, dialogue=json.dumps(DIALOGUE), turns=2) if kept.iteration else None
    failed: dict[str, Any] = {"status": "failed", "reason": "the engine died \x1b[2J", "policy_versions": []}
    return [
        *(talked if talked and not at else _sample(kept, at, text) for at, text in enumerate(said)),
        *(_sample(same, at, "1") for at in range(3)),
        _sample(lost, 0, "", **failed),
    ]


def _turns(group: DrawnGroup) -> list[TurnRow]:
    """Two turns with a call between them, and a branch after the first."""
    rollout = sample_id(group.group_id, 0)
    row = TurnRow(
        rollout_id=rollout, group_id=group.group_id, order=0, branch=0, kind="segment", engine_id="engine-0",
        output_ids=IDS.encode("5").ids, policy_versions=[{"first_token": 0, "version": group.iteration}],
        ended="stop", text="<think>I need a tool.</think>",
    )  # fmt: skip
    arguments = json.dumps(CALL["arguments"])
    return [
        row,
        replace(row, order=1, event=1, kind="call", tool="add", arguments=arguments, text="5", output_ids=[]),
        replace(
            row, order=2, event=2, output_ids=IDS.encode("é.").ids, text="It is 5é.", new='[{"role": "tool"}]'
        ),
        replace(row, order=3, branch=1, parent=0, parent_turns=1, name="critic", text="Right."),
    ]


def _verdict(sample: GeneratedSample, index: int) -> JudgedSample:
    what = sample.group_id[:4]
    kept = what == "kept"
    reason = {"same": "zero variance", "lost": "too few scored samples"}.get(what)
    return JudgedSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt_id=sample.prompt_id,
        verdict="kept" if kept else "dropped",
        reason=reason,
        train_step=index + 1 if kept else None,
        dropped_by=None if kept else {"same": "zero_variance", "lost": "not_generated"}[what],
        group_reward=2 / 3 if kept else 0.0,
    )


def _commit(folder: RunFolder, index: int, said: Sequence[str]) -> None:
    store, drawn = folder.iteration(index), _groups(index)
    samples = _rollouts(drawn, said)
    scores = {score.sample_id: score for score in _scores(samples)}
    spare = _verdict(samples[0], index)
    spare = replace(
        spare,
        sample_id="spare-0000",
        group_id=drawn[3].group_id,
        prompt_id="spare",
        verdict="returned",
        train_step=None,
    )
    verdicts = [*(_verdict(sample, index) for sample in samples), spare]
    batch = [
        _trained(sample, scores[sample.sample_id], index) for sample in samples if sample.group_id[0] == "k"
    ]
    if index == 1:
        # the first kept group is trained once more
        again = [_trained(sample, score, 1, 0) for sample, score in _first(folder)]
        batch += again
        verdicts += [
            replace(_verdict(sample, 1), reused_from=0, reused_ordinal=0) for sample, _ in _first(folder)
        ]
    logprobs = [
        SampleLogprobs(
            sample_id=row.sample_id,
            train_step=row.train_step,
            trainer_logprobs=[value - 0.125 for value in row.rollout_logprobs],
        )
        for row in batch
    ]
    step = {"version": index + 1, "samples": len(batch), "loss": 0.5, "grad_norm": 1.0, "lr": 1e-3}
    files = [
        write_rows(store, "prompts", drawn),
        write_rows(store, "verdicts", verdicts),
        write_rows(store, "batch", batch),
        store.write_json("step.json", {"version": index + 1, "steps": [step]}).record(),
        write_part(store, "rollouts", schema.to_table(samples, "rollouts"), "rollouts").record(),
        write_part(store, "rewards", schema.to_table(list(scores.values()), "rewards"), "rewards").record(),
        write_part(
            store, "turns", schema.to_table(_turns(drawn[0]) if index else [], "turns"), "turns"
        ).record(),
        store.write_table(
            "logprobs/rank-00000.parquet", schema.to_table(logprobs, "logprobs"), "logprobs"
        ).record(),
    ]
    _evaluate(folder, index + 1)
    files.append(store.entry(record_path("evaluate")).record())
    content = {"iteration": index, "files": files, "tasks": {"trained_version": index + 1, **_figures(index)}}
    manifest = Manifest.model_validate(content)
    folder.commit_manifest(index, manifest.model_copy(update={"history": outcomes(store, index, manifest)}))


def _figures(index: int) -> dict[str, Any]:
    start = START + 100 * index
    return {
        "metrics": {
            "reward/mean": 0.5 + index / 4,
            "train/loss": 0.5,
            "train/version": index + 1.0,
            "rollout/response_length_mean": 1.5,
            "rollout/kv_used_max": 0.83,
            "rollout/queue_max": 4.0,
            "staleness/mean": 0.5,
            "time/rollout_s": 8.0,
            "time/train_step_s": 2.0,
            "time/sync_weights_s": 0.5,
            "time/sync_export_s": 0.25,
            "time/iteration_s": 12.0,
            "filter/groups_dropped": 2.0,
            "filter/dropped_zero_variance": 1.0,
            "tokens/generated": 10.0,
            "tokens/trained": 7.0,
            "tokens/dropped": 3.0,
            "eval/easy/reward_mean": 0.5 * (index + 1),
        },
        "committed": start + 12,
        "worked": {
            "rollout": [start, start + 8],
            "train_step": [start + 8, start + 10],
            "sync_weights": [start + 10, start + 10.5],
        },
    }


def _trained(
    sample: GeneratedSample, score: ScoredSample, index: int, reused_from: int | None = None
) -> BatchSample:
    return BatchSample(
        **{name: getattr(sample, name) for name in GeneratedSample.__slots__},
        reward=score.reward,
        reward_parts=score.reward_parts,
        reward_texts=score.reward_texts,
        answer=score.answer,
        scoring=score.scoring,
        verdict="kept",
        shaped_reward=score.reward,
        advantage=0.5 - (sample.index == 1),
        train_step=index + 1,
        reused_from=reused_from,
        uses=None if reused_from is None else 2,
    )


def _first(folder: RunFolder) -> list[tuple[GeneratedSample, ScoredSample]]:
    samples = [_sample(_groups(0)[0], at, text) for at, text in enumerate(("5", "4", "7"))]
    return list(zip(samples, _scores(samples), strict=True))


def _evaluate(folder: RunFolder, done: int) -> None:
    rows = [
        EvaluatedSample(
            set="easy",
            prompt_id=f"easy-{number}",
            index=0,
            prompt=json.dumps(f"{number}+1="),
            label=json.dumps(str(number + 1)),
            response=f"{number + 1}" if number < done else "none <img src=x>",
            response_length=1,
            status="completed",
            reward=float(number < done),
            scoring="scored",
            version=done,
            subset=None,
            reason=None,
        )
        for number in range(2)
    ]
    entry = folder.store.write_table(
        f"eval/easy/{done:06d}.parquet", schema.to_table(rows, "evaluations"), "evaluations"
    )
    sets = {"easy": {"file": entry.record(), "reward_mean": done / 2, "samples": 2, "not_scored": 0}}
    record_task(
        folder.iteration(done - 1), "evaluate", {"version": done, "done": done, "sets": sets, "seconds": 1.0}
    )
