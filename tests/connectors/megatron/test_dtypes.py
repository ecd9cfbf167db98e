"""One type of weights: that of model.dtype, whatever the checkpoint is stored in and however weights reach an engine.

Every way gives the engine the same bytes, and an export says in config.json what its files hold.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.launch import embedded_command
from millrace.connectors.engines.embedded.model import Weights
from millrace.connectors.engines.sglang.launch import sglang_command
from millrace.core.config import RunConfig
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers, configuration, log_probabilities, samples, write_batch

BOUNDS = {
    "float32": 1e-5,
    "bfloat16": 0.02,
}  # of the mean difference, by model.dtype; sync.max_logprob_gap is 0.02
STORED = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def stored(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One peaked model, stored in each type."""
    source = model("qwen3", tie_word_embeddings=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: tensor * 10
        if tensor.ndim > 1
        else tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    folders = {}
    for dtype in STORED:
        folder = tmp_path_factory.mktemp(dtype)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        save_file(
            {name: t.to(getattr(torch, dtype)) for name, t in tensors.items()}, folder / "model.safetensors"
        )
        folders[dtype] = folder
    return folders


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def engine_of(config: dict[str, Any], folder: Path) -> Engine:
    """An embedded engine with the type that its command line names."""
    command = embedded_command(RunConfig.model_validate(config), str(folder), folder / "port")
    return Engine(
        str(folder),
        max_running=4,
        max_total_tokens=1024,
        weight_version="0",
        seed=0,
        dtype=option(command, "--dtype"),
    )


def engines_logprobs(engine: Engine, step: int) -> dict[str, list[float]]:
    found = {}
    for row in samples(step):
        tokens = torch.tensor(row["tokens"])
        padded = torch.zeros(1, 32, dtype=torch.long)
        padded[0, : len(tokens)] = tokens
        hidden, _, _ = engine.decoder.prefill(padded)
        logprobs = engine.decoder.logits(hidden[0, : len(tokens) - 1]).log_softmax(-1)
        every = logprobs.gather(1, tokens[1:, None])[:, 0]
        found[row["sample_id"]] = every[-row["response_length"] :].tolist()
    return found


def mean_gap(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    pairs = [abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True)]
    return sum(pairs) / len(pairs)


def buckets(rank: Any) -> dict[str, Tensor]:
    """All weights, as ipc and broadcast send them."""
    tensors: dict[str, Tensor] = {}
    number, last = 0, False
    while not last:
        bucket = rank.bucket(1, number, 2**14, False)
        for name, shape, dtype, start, end in bucket.entries:
            tensors[name] = rank._stream.flat[start:end].view(getattr(torch, dtype)).view(shape).clone()
        number, last = number + 1, bucket.last
    rank.end_buckets()
    return tensors


@pytest.fixture
def batches(tmp_path: Path) -> str:
    for step in (1, 2):
        write_batch(tmp_path / str(step), samples(step))
    return str(tmp_path / "{}" / "batch.parquet")


@pytest.mark.parametrize(
    ("checkpoint", "dtype"),
    slow_but(
        product(STORED, BOUNDS), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")
    ),
)
def test_engine_and_trainer_agree_before_and_after_each_way_of_sync(
    workers: Workers, stored: dict[str, Path], batches: str, tmp_path: Path, checkpoint: str, dtype: str
) -> None:
    """An engine kept the type of its folder, and a folder was written in the type of the one before."""
    wanted, exported = getattr(torch, dtype), tmp_path / "exported"
    config = configuration(stored[checkpoint], dtype=dtype)
    engine = engine_of(config, stored[checkpoint])
    assert engine.decoder.weights.dtype == wanted
    with workers.group(config) as group:
        (before,) = group.run(log_probabilities, batches.format(1))
        assert mean_gap(before, engines_logprobs(engine, 1)) < BOUNDS[dtype]
        group.train([1], batches.format(1))
        group.call("export", str(exported), 1)
        (sent,) = group.run(buckets)
        (after,) = group.run(log_probabilities, batches.format(2))
    written = load_file(exported / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {wanted}
    assert json.loads((exported / "config.json").read_text())["dtype"] == dtype
    assert written.keys() == sent.keys()
    assert all(torch.equal(written[name], sent[name]) for name in sent)
    engine.update_from_disk(str(exported), "1")
    held = engine.decoder.weights.tensors
    assert all(torch.equal(held[name], sent[name]) for name in sent)
    assert mean_gap(after, engines_logprobs(engine, 2)) < BOUNDS[dtype]
    engine.replace_weights(Weights(engine.shape, {**held, **sent}), "2")  # as updates by name do
    assert mean_gap(after, engines_logprobs(engine, 2)) < BOUNDS[dtype]


@pytest.mark.parametrize("names", [("torch_dtype",), ("dtype", "torch_dtype"), ()])
def test_an_export_names_its_type_where_the_source_did(
    workers: Workers, stored: dict[str, Path], tmp_path: Path, names: tuple[str, ...]
) -> None:
    source = tmp_path / "source"
    shutil.copytree(stored["bfloat16"], source)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps({**config, **dict.fromkeys(names, "bfloat16")}))
    with workers.group(configuration(source)) as group:
        group.call("export", str(tmp_path / "exported"), 0)
    found = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert found == {**config, **dict.fromkeys(names or ("dtype",), "float32")}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_both_engines_are_told_the_type(stored: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    values = configuration(stored["float32"], dtype=dtype)
    assert option(embedded_command(RunConfig.model_validate(values), "m", tmp_path), "--dtype") == dtype
    config = RunConfig.model_validate({**values, "engines": {"kind": "sglang"}})
    assert option(sglang_command(config, "m", 1, 0, 2, Path("keys.yaml")), "--dtype") == dtype
