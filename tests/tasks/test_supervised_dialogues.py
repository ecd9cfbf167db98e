"""Batches and held-out losses of dialogues, over real files and a real run folder; ranks stand in for the trainer's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path
from typing import Any

import pytest

from examples.sft_dialogues.price_list import row, write
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.config import RunConfig
from millrace.core.errors import ActorLostError
from millrace.tasks.context import IterationContext
from millrace.tasks.publish import _supervised_figures
from millrace.tasks.runtime.runtime import Runtime
from millrace.tasks.supervised import held_out_loss as module
from millrace.tasks.supervised.held_out_loss import held_out_loss, held_out_loss_before
from millrace.tasks.supervised.sample_supervised import sample_supervised
from tests.support.asked_here import RanksHere

MakeConfig = Callable[..., RunConfig]
COLUMNS = {"prompt_key": "messages", "tools_key": "tools", "loss_on": "assistant"}
COUNT = 10
STAGES = [{"weights": {"prices": 1}, "iterations": 1}, {"weights": {"later": 1}}]


class Ranks(RanksHere):
    """Trainer ranks by which a token's loss is 2, and which are lost after so many calls."""

    def __init__(self, calls: int = 100) -> None:
        self.left = calls
        self.asked: list[HeldOutSample] = []
        self.versions: set[int] = set()

    async def at(self, version: int, ahead: int = 0) -> Ranks:
        self.versions.add(version)
        return self

    async def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        if self.left == 0:
            raise ActorLostError("rank 0 is gone")
        self.left -= 1
        self.asked += samples
        return [2.0 * sum(sample.mask) for sample in samples]


@pytest.fixture
def make_context(tmp_path: Path, make_config: MakeConfig) -> Callable[..., IterationContext]:
    rng = random.Random(0)
    unusable: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    write(tmp_path / "train.jsonl", [row(rng) for _ in range(COUNT)] + [unusable])
    write(tmp_path / "held_out.jsonl", [row(rng) for _ in range(COUNT)])
    build_tiny_model(tmp_path / "model", tools=True)
    source = {"name": "prices", "path": str(tmp_path / "train.jsonl"), **COLUMNS}
    config = make_config(
        model={"path": str(tmp_path / "model")},
        data={"sources": [source, {**source, "name": "later"}], "stages": STAGES},
        rollout={"prompts": 4, "samples_per_prompt": 1},
        algorithm={"loss": "sft"},
        evaluation={
            "sets": [
                {"name": "held", "path": str(tmp_path / "held_out.jsonl"), "subset_key": "kind", **COLUMNS}
            ]
        },
    )

    def make(ranks: Ranks, index: int = 0) -> IterationContext:
        runtime = Runtime(config)
        runtime.memory._trainer = ranks  # type: ignore[assignment]
        return IterationContext(runtime, index)

    return make


async def test_a_batch_holds_whole_dialogues_with_their_masks(
    make_context: Callable[..., IterationContext],
) -> None:
    ctx = make_context(Ranks())
    record = await sample_supervised.fn(ctx)
    batch = ctx.folder.read_table("batch.parquet", "batch").to_pylist()
    decode = ctx.runtime.prompts.tokenizer.tokenizer.decode
    assert len(batch) == record["rows"] == 4
    for sample in batch:
        text = decode(sample["tokens"])
        messages = json.loads(sample["prompt"])
        assert text.startswith("<system>price(item)<user>What do ")
        assert sample["response"] == text.removeprefix(
            f"<system>price(item)<user>{messages[0]['content']}<assistant>"
        )
        trained = [
            token
            for token, mask in zip(
                sample["tokens"][-sample["response_length"] :], sample["loss_mask"], strict=True
            )
            if mask
        ]
        wrong = [message["content"] for message in messages if message.get("train") is False]
        assert decode(trained).count("<eos>") == sample["turns"] == 3
        assert not any(text in decode(trained) for text in wrong)
    assert record["tokens"] == sum(sum(sample["loss_mask"]) for sample in batch)
    (refused,) = ctx.runtime.prompts.dataset.sources["prices"].quarantined
    assert refused.reason == "nothing to train: no message is the assistant's"


async def test_each_iteration_publishes_the_stage_that_it_drew_from(
    make_context: Callable[..., IterationContext],
) -> None:
    stages = []
    for index, source in enumerate(["prices", "later"]):
        ctx = make_context(Ranks(), index)
        drawn = ctx.records["sample_supervised"] = await sample_supervised.fn(ctx)
        ctx.records["train_step"] = {
            "files": [],
            "version": index + 1,
            "steps": [{"version": index + 1}],
            "rest_s": 0.0,
            "seconds": 0.0,
        }
        assert drawn["by_source"] == {source: 4}
        stages.append(_supervised_figures(ctx)["curriculum/stage"])
        files = [FileEntry.model_validate(file) for file in drawn["files"]]
        ctx.run_folder.commit_manifest(index, Manifest(iteration=index, files=files))
    assert stages == [0.0, 1.0]


async def test_a_measurement_goes_on_where_it_was_lost(
    make_context: Callable[..., IterationContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 4)
    first = Ranks(calls=2)
    with pytest.raises(ActorLostError):
        await held_out_loss.fn(make_context(first))
    again = Ranks()
    ctx = make_context(again)
    record = await held_out_loss.fn(ctx)
    assert (len(first.asked), len(again.asked)) == (8, 2)
    assert (record["version"], record["done"], first.versions | again.versions) == (1, 1, {1})
    assert sum(file["rows"] or 0 for file in record["files"]) == COUNT
    held = record["sets"]["held"]
    tokens = sum(sum(sample.mask) for sample in [*first.asked, *again.asked])
    assert (held["loss"], held["perplexity"]) == (pytest.approx(2.0), pytest.approx(exp(2.0)))
    assert (held["samples"], held["tokens"]) == (COUNT, tokens)
    assert sum(part["samples"] for part in held["subsets"].values()) == COUNT
    assert set(held["subsets"]) <= {"plain", "corrected"}
    stored = ctx.run_folder.store.read_table("eval/held/000001.parquet", "evaluations").to_pylist()
    assert [sample["loss_tokens"] for sample in stored] == [
        sum(sample.mask) for sample in [*first.asked, *again.asked]
    ]


async def test_the_loss_before_training_is_of_the_first_version(
    make_context: Callable[..., IterationContext],
) -> None:
    ranks = Ranks()
    record = await held_out_loss_before.fn(make_context(ranks))
    assert (record["version"], record["done"], ranks.versions) == (0, 0, {0})
    assert record["sets"]["held"]["file"]["path"] == "eval/held/000000.parquet"
