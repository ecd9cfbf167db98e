"""What no step changes: a router's bias in float32, and layers that predict further tokens, back bit for bit from any layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.connectors.engines.embedded.model import read_shape, read_tensors
from tests.connectors.megatron.test_buckets import passed
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers, configuration, samples, write_batch

LAYOUTS: dict[str, dict[str, Any]] = {
    "experts apart": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "tensor": {"tensor": 2, "sequence": True},
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as they are published: bfloat16 but for the bias, with a layer after the last that transformers drops."""
    plain, made = model("deepseek_v3"), tmp_path_factory.mktemp("published")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    tensors[BIAS] = load_file(plain / "model.safetensors")[BIAS]
    tensors |= {
        f"model.layers.2.{name}": torch.randn(shape).bfloat16()
        for name, shape in (
            ("eh_proj.weight", (32, 64)),
            ("enorm.weight", (32,)),
            ("self_attn.q_a_proj.weight", (20, 32)),
        )
    }
    save_file(tensors, made / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (made / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "num_nextn_predict_layers": 1})
    )
    return made


def bytes_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, as bytes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {
                name: file.get_tensor(name).contiguous().view(torch.uint8) for name in file.offset_keys()
            }
    return found


@pytest.fixture(scope="module")
def predicting(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with tensors of their own names that predict tokens after the next one."""
    plain, made = model("qwen3_next"), tmp_path_factory.mktemp("predicting")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()}
    tensors |= {
        f"mtp.{name}.weight": torch.randn(shape).bfloat16()
        for name, shape in (("fc", (32, 64)), ("norm", (32,)), ("layers.0.mlp.gate", (4, 32)))
    }
    save_file(tensors, made / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return made


def sent_and_trained(workers: Workers, model: Path, into: Path, layout: str, kept: set[str]) -> Any:
    """What each rank sends to engines. Asserts that exports have the model's tensors, of which a step changes all but the kept ones."""
    before = bytes_of(model)
    config = configuration(model, 2, parallel=LAYOUTS[layout], dtype="bfloat16", optimizer={"lr": 0.1})
    with workers.group(config) as group:
        group.call("export", str(into / "same"), 0)
        sent = group.run(passed)
        group.train([1], write_batch(into / "batch", samples(1)))
        group.call("export", str(into / "trained"), 1)
    same, trained = bytes_of(into / "same"), bytes_of(into / "trained")
    assert same.keys() == before.keys() == trained.keys()
    assert all(same[name].equal(before[name]) for name in before)
    assert {name for name in before if trained[name].equal(before[name])} == kept
    return sent


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "tensor"))
def test_a_step_changes_every_tensor_but_those_that_predict(
    workers: Workers, predicting: Path, tmp_path: Path, layout: str
) -> None:
    """They are not sent to engines either."""
    before = bytes_of(predicting)
    kept = {name for name in before if name.startswith("mtp.")}
    for buckets in sent_and_trained(workers, predicting, tmp_path, layout, kept):
        assert {name for tensors, *_ in buckets for name in tensors} == before.keys() - kept


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "pipeline"))
def test_a_step_changes_every_tensor_but_those_that_are_kept(
    workers: Workers, folder: Path, tmp_path: Path, layout: str
) -> None:
    before = bytes_of(folder)
    kept = {BIAS, *(name for name in before if name.startswith("model.layers.2."))}
    for buckets in sent_and_trained(workers, folder, tmp_path, layout, kept):
        of_engine = {name: tensor for tensors, *_ in buckets for name, tensor in tensors.items()}
        assert of_engine[BIAS].dtype == torch.float32
        assert {
            name: tensor.contiguous().view(torch.uint8).tolist() for name, tensor in of_engine.items()
        } == {name: tensor.tolist() for name, tensor in before.items() if name not in kept - {BIAS}}
        assert all(len({tensor.dtype for tensor in tensors.values()}) == 1 for tensors, *_ in buckets)


def test_the_embedded_engine_keeps_the_bias_exact(folder: Path) -> None:
    tensors = read_tensors(folder, read_shape(folder), torch.bfloat16)
    assert tensors[BIAS].equal(load_file(folder / "model.safetensors")[BIAS])
    assert {tensor.dtype for name, tensor in tensors.items() if name != BIAS} == {torch.bfloat16}
    assert not any(name.startswith("model.layers.2.") for name in tensors)
