"""A newcomer's tasks, done in order by the pages' own commands, in an empty folder and without PYTHONPATH.

What a page takes from elsewhere is here a random model, a hundred sums, and sizes for two cores. Each task is a test; later ones use
what earlier ones made.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from tests.support.doc_commands import Reader, blocks
from tests.support.flow_runs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sequence, pytest.mark.xdist_group("first_hour")]
SUMS = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
SUPERVISED = "models#supervised-training"
SMALL = (
    "model.path=model",
    "run.iterations=2",
    "trainer.threads=1",
    "trainer.max_pack_tokens=512",
    "trainer.optimizer.lr=1e-3",
)
TINY = (
    *SMALL,
    "data.max_prompt_tokens=64",
    "rollout.prompts=8",
    "rollout.samples_per_prompt=4",
    "rollout.sampling.max_new_tokens=8",
    "trainer.global_batch=16",
    "engines.threads=1",
    "reward.workers=1",
    "checkpoint.every=1",
    "evaluation.sets=[]",
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    found = Reader(tmp_path_factory.mktemp("first-hour"))
    build_tiny_model(found.folder / "model")
    lines = "".join(json.dumps(row) + "\n" for row in SUMS)
    (found.folder / "train.jsonl").write_text(lines)
    yield found
    found.calls("millrace", "server", "stop")


def without(overrides: tuple[str, ...], *fields: str) -> tuple[str, ...]:
    return tuple(item for item in overrides if item.partition("=")[0] not in fields)


def test_own_data_and_an_own_reward_are_checked_and_trained(reader: Reader) -> None:
    reader.writes("rewards", "python", "rewards.py")
    reader.writes("rewards", "yaml", "run.yaml")
    plan = reader.types("rewards", "millrace check run.yaml", *TINY)
    assert "train.jsonl: 100 rows" in plan
    assert "rewards:score gives on row 0" in plan
    assert "2 iterations complete, 2 of them now" in reader.types("rewards", "millrace train run.yaml", *TINY)
    for command in blocks("rewards", "sh")[0].splitlines()[2:]:
        assert (
            "digits" in reader.types("rewards", command.partition("  #")[0], "--json") or "label" in command
        )


def test_chat_messages_sources_with_weights_and_rows_that_cannot_be_used(reader: Reader) -> None:
    sums = reader.folder / "sums"
    sums.mkdir()
    rows = [*blocks("data", "jsonl")[0].splitlines(), '{"question": "no prompt"}', "{"]
    (sums / "train.jsonl").write_text("\n".join([*rows, *(json.dumps(row) for row in SUMS)]) + "\n")
    (sums / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[:8]))
    level = json.loads(blocks("data", "json")[0])
    pq.write_table(pa.Table.from_pylist([level] * 12), sums / "level.parquet")
    (sums / "run.yaml").write_text(blocks("data", "yaml")[0].replace("name: mine", "name: chat"))
    sizes = (*without(TINY, "evaluation.sets"), "evaluation.sets.0.sampling.max_new_tokens=8")
    plan = reader.types("data", "millrace check sums/run.yaml", *sizes)
    assert re.search(r"data sums .*2 unusable", plan), plan
    assert "reward" in reader.types("data", "millrace train sums/run.yaml", *sizes)
    query = "select system, prompt, label from prompts"
    sent = json.loads(reader.calls("millrace", "sql", "chat", query, "--json"))
    assert {row["system"] for row in sent} >= {None}
    by_source = json.loads(
        reader.calls(
            "millrace", "sql", "chat", "select source, count(*) as n from batches group by 1", "--json"
        )
    )
    assert {row["source"]: row["n"] for row in by_source} == {"sums": 16, "level": 48}
    bad = pq.read_table(reader.folder / "runs" / "chat" / "quarantine.parquet").to_pylist()
    assert len(bad) == 2
    assert all(row["reason"] for row in bad)
    shown = json.loads(reader.calls("millrace", "show", "chat", "--json"))
    assert {row["iteration"] for row in shown["rows"]} >= {0, 1, 2}, shown


@pytest.mark.parametrize("preset", ["dapo", "gspo", "reinforce_plus_plus", "ppo"])
def test_another_algorithm_is_one_word(reader: Reader, preset: str) -> None:
    name = preset.replace("_", "-")
    sizes = (
        *without(TINY, "run.iterations"),
        "run.iterations=1",
        f"algorithm.preset={preset}",
        f"run.name={name}",
    )
    assert f"preset {preset}" in reader.calls("millrace", "check", "run.yaml", *sizes)
    out = reader.calls("millrace", "train", "run.yaml", *sizes)
    assert "1 iterations complete, 1 of them now" in out


def test_a_run_is_interrupted_continued_extended_and_its_learning_rate_changed_as_the_message_says(
    reader: Reader,
) -> None:
    longer = (*without(TINY, "run.iterations"), "run.iterations=30")
    process = reader.starts("millrace", "train", "run.yaml", *longer)
    done = reader.folder / "runs" / "mine" / "iterations" / "000003" / "manifest.json"
    wait_until(lambda: done.exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "the same command goes on" in out
    five = (*without(TINY, "run.iterations"), "run.iterations=5")
    assert "5 iterations complete" in reader.calls("millrace", "train", "run.yaml", *five)
    assert "0 of them now" in reader.calls("millrace", "train", "run.yaml", *five)
    changed = (*without(five, "trainer.optimizer.lr"), "trainer.optimizer.lr=2e-4")
    refused = " ".join(reader.calls("millrace", "train", "run.yaml", *changed, expect=2).split())
    assert "trainer.optimizer.lr" in refused
    found = re.search(
        r"`(millrace branch \S+) NEW (--at \d+) --root (\S+)`, then train run.name=NEW", refused
    )
    assert found, refused
    reader.calls(*found[1].split(), "slower", *found[2].split(), "--root", found[3])
    six = (*without(changed, "run.iterations"), "run.iterations=6", "run.name=slower")
    assert "6 iterations complete, 1 of them now" in reader.calls("millrace", "train", "run.yaml", *six)
    rates = json.loads(reader.calls("millrace", "sql", "slower", "select distinct lr from steps", "--json"))
    assert {row["lr"] for row in rates} == {1e-3, 2e-4}


def test_what_a_run_did_is_listed_asked_verified_and_replayed(reader: Reader) -> None:
    names = {row["run"] for row in json.loads(reader.calls("millrace", "runs", "--json"))}
    assert {"mine", "chat", "slower"} <= names
    for query in blocks("looking", "sql"):
        json.loads(reader.calls("millrace", "sql", "chat", query, "--json"))
    assert "nothing is wrong" in reader.calls("millrace", "verify", "mine")
    assert "equal" in reader.calls("millrace", "replay", "mine", "--from", "3", "--to", "4").lower()


def test_supervised_training_and_rl_from_its_export(reader: Reader) -> None:
    reader.writes(SUPERVISED, "yaml", "sft.yaml")
    reader.writes(SUPERVISED, "yaml", "rl.yaml", 2)
    sizes = (
        *SMALL,
        "data.max_prompt_tokens=64",
        "rollout.prompts=32",
        "checkpoint.export_every=2",
        "trainer.global_batch=16",
        "trainer.schedule.warmup_steps=0",
    )
    reader.types(SUPERVISED, "millrace check sft.yaml", *sizes)
    assert "2 iterations complete" in reader.types(SUPERVISED, "millrace train sft.yaml", *sizes)
    (query,) = [line for line in blocks(SUPERVISED, "sh")[0].splitlines() if line.startswith("millrace sql")]
    losses = json.loads(reader.types(SUPERVISED, query, "--json"))
    assert len(losses) == 4
    assert losses[-1]["loss"] < losses[0]["loss"]
    text = (reader.folder / "rl.yaml").read_text()
    assert "runs/warm/exports/000020" in text
    (reader.folder / "rl.yaml").write_text(text.replace("000020", "000002"))
    rl = (*without(TINY, "model.path"), "run.name=after")
    assert "2 iterations complete" in reader.types(SUPERVISED, "millrace train rl.yaml", *rl)


def test_an_export_generates_in_transformers(reader: Reader) -> None:
    exports = reader.folder / "runs" / "mine" / "exports"
    newest = sorted(path.name for path in exports.iterdir())[-1]
    code = blocks("models#use-an-export-elsewhere", "python")[0].replace("000200", newest)
    (reader.folder / "generate.py").write_text(code)
    assert reader.calls("python", "generate.py").strip()


def test_two_engines_and_a_tensor_parallel_trainer(reader: Reader) -> None:
    out = reader.calls(
        "millrace",
        "train",
        "run.yaml",
        *without(TINY, "run.iterations"),
        "run.iterations=1",
        "run.name=wide",
        "engines.count=2",
        "trainer.world_size=2",
        "trainer.parallel.tensor=2",
    )
    assert "1 iterations complete" in out


def test_a_run_moves_to_a_bucket_and_goes_on(reader: Reader, s3_bucket: str) -> None:
    for name in os.environ:
        if name.startswith("AWS_"):
            reader.environment[name] = os.environ[name]
    (move,) = [
        line for line in blocks("running#move-a-run", "sh")[0].splitlines() if line.startswith("python")
    ]
    code = re.search(r'"(.*)"', move)
    assert code
    root = f"{s3_bucket}/runs"
    reader.calls("python", "-c", code[1].replace("s3://bucket", s3_bucket))
    assert "nothing is wrong" in reader.calls("millrace", "verify", "mine", "--root", root)
    seven = (*without(TINY, "run.iterations"), "run.iterations=7", f"storage.root={root}")
    assert "7 iterations complete, 2 of them now" in reader.calls("millrace", "train", "run.yaml", *seven)
    assert "nothing is wrong" in reader.calls("millrace", "verify", "mine", "--root", root)
    (fetch,) = [
        line
        for line in blocks("running#on-an-object-store", "sh")[2].splitlines()
        if line.startswith("python")
    ]
    code = re.search(r'"(.*)"', fetch)
    assert code
    text = code[1].replace("s3://bucket", s3_bucket).replace("000200", "000007")
    reader.calls("python", "-c", text)
    assert (reader.folder / "my-model" / "model.safetensors").exists()
    shutil.rmtree(reader.folder / "my-model")


def test_a_reward_that_raises_is_corrected_and_the_same_command_goes_on(reader: Reader) -> None:
    right = (reader.folder / "rewards.py").read_text()
    wrong = right.replace("exact = ", "sample.labels\n    exact = ")
    (reader.folder / "rewards.py").write_text(
        wrong.replace("sample.labels", "if len(sample.response) > 2: sample.labels")
    )
    run = (*TINY, "run.name=raises")
    out = reader.calls("millrace", "train", "run.yaml", *run, expect=2)
    assert "labels" in out
    assert "Traceback" not in out
    (reader.folder / "rewards.py").write_text(right)
    assert "2 iterations complete" in reader.calls("millrace", "train", "run.yaml", *run)
    assert "nothing is wrong" in reader.calls("millrace", "verify", "raises")
