"""Quantised checkpoints: each kind's weights are the numbers that its layout says, and what is not exactly one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.connectors.engines.embedded.model import read_shape, read_tensors
from millrace.connectors.trainers.megatron.conversion.conversion import Conversion, Order
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.quantised.kinds import KINDS, is_read
from millrace.flows.preflight import check_model
from tests.support.tiny_models import save_tiny_model
from tests.support.wrong_configs import GOOD

FP8: dict[str, Any] = {  # DeepSeek-V3
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
INT4: dict[str, Any] = {  # Kimi-K2-Thinking
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": WEIGHTS,
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
PUBLISHED = {
    "DeepSeek-V3": FP8,
    "DeepSeek-V3.1": {**FP8, "scale_fmt": "ue8m0"},
    "Qwen3-8B-FP8": {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]},
    "Kimi-K2-Thinking": INT4,
}
ROWS, COLUMNS = 20, 12  # of a block, which divide no size of the model
GROUP = 8


def fp8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A weight as it is stored, and number by number what it is read as."""
    rows, columns = weight.shape
    stored = weight.to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // ROWS), -(-columns // COLUMNS)) + 0.5
    made = torch.empty(rows, columns, dtype=torch.bfloat16)
    for i in range(rows):
        for j in range(columns):
            made[i, j] = float(stored[i, j]) * float(scale[i // ROWS, j // COLUMNS])
    return {name: stored, f"{name}_scale_inv": scale}, made


def int4(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A weight as it is stored, and number by number what it is read as."""
    rows, columns = weight.shape
    numbers = torch.randint(-8, 8, (rows, columns))
    scale = (torch.rand(rows, columns // GROUP) + 0.5).bfloat16()
    made, words = torch.empty(rows, columns, dtype=torch.bfloat16), []
    for i in range(rows):
        for j in range(columns):
            made[i, j] = int(numbers[i, j]) * float(scale[i, j // GROUP])
        for first in range(0, columns, 8):
            word = sum((int(numbers[i, first + k]) + 8) << (4 * k) for k in range(8))
            words.append(word - (1 << 32) * (word >> 31))
    packed = torch.tensor(words, dtype=torch.int32).reshape(rows, columns // 8)
    parts = {"_packed": packed, "_scale": scale, "_shape": torch.tensor([rows, columns])}
    return {f"{name}{end}": part for end, part in parts.items()}, made


Store = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
KIND_OF: dict[str, tuple[dict[str, Any], Store]] = {
    "fp8": ({**FP8, "weight_block_size": [ROWS, COLUMNS]}, fp8),
    "compressed-tensors": (
        {**INT4, "config_groups": {"group_0": {"weights": {**WEIGHTS, "group_size": GROUP}}}},
        int4,
    ),
}


def configure(folder: Path, config: dict[str, Any] | None) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))


def quantise(kind: str, folder: Path) -> dict[str, Tensor]:
    """Store the linear layers of a folder's second layer quantised; returns what all weights are read as."""
    torch.manual_seed(0)
    config, store = KIND_OF[kind]
    configure(folder, config)
    stored, made = {}, {}
    for name, original in load_file(folder / "model.safetensors").items():
        tensor = original.bfloat16()
        parts, made[name] = {name: tensor}, tensor
        if ".layers.1." in name and name.endswith("_proj.weight"):
            parts, made[name] = store(name, tensor)
        stored |= parts
    save_file(stored, folder / "model.safetensors")
    return made


@pytest.fixture(params=list(KIND_OF))
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, Tensor]]:
    """The kind, a folder with some weights quantised, and what all are read as."""
    folder = save_tiny_model(tmp_path / "quantised", "qwen3", 37)
    return request.param, folder, quantise(request.param, folder)


def test_each_kind_has_a_row() -> None:
    # MXFP4 is of experts that are stored together: tests/core/test_mxfp4.py
    assert {*KIND_OF, "mxfp4"} == set(KINDS)
    assert all(map(is_read, PUBLISHED.values()))


def test_a_quantised_weight_is_read_as_its_numbers_times_their_factors(
    quantised: tuple[str, Path, dict[str, Tensor]],
) -> None:
    _, folder, made = quantised
    arch = architecture(read_hf_config(str(folder)))
    for mapped in (True, False):
        tensors = FolderTensors(str(folder), arch, mapped=mapped)
        for name, wanted in made.items():
            assert tensors.type_of(name) == "bfloat16"
            for rows in (slice(None), slice(3, len(wanted) - 1), slice(len(wanted) - 1, len(wanted))):
                assert torch.equal(tensors.rows(name, rows), wanted[rows]), (name, rows)


def test_engine_and_conversion_read_the_same_and_what_is_written_is_not_quantised(
    quantised: tuple[str, Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    _, folder, made = quantised
    served = read_tensors(folder, read_shape(folder), None)
    assert all(torch.equal(served[name], tensor) for name, tensor in made.items())
    for source, target, to in (
        (folder, "there", None),
        (tmp_path / "there", "back", None),
        (folder, "hf", "hf"),
    ):
        conversion = Conversion(Order(source, tmp_path / target, to=to))  # type: ignore[arg-type]
        conversion.convert()
        conversion.verify()
    for written in (tmp_path / "back", tmp_path / "hf"):
        found = load_file(written / "model.safetensors")
        assert found.keys() == made.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in made.items())
        config = json.loads((written / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == "bfloat16"


CHANGES: dict[str, list[dict[str, Any]]] = {
    "fp8": [
        {"weight_block_size": None},  # a factor for the whole weight
        {"weight_block_size": [128]},
        {"activation_scheme": "static"},
        {"fmt": "e5m2"},
        {"quant_method": "fbgemm_fp8"},
        {"another": 1},
    ],
    "compressed-tensors": [
        {"format": "int-quantized"},
        {"kv_cache_scheme": {"num_bits": 8}},
        {"config_groups": {}},
        {"config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": WEIGHTS}}},
        {"config_groups": {"a": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}},
        *(
            {"config_groups": {"a": {"weights": {**WEIGHTS, **change}}}}
            for change in (
                {"num_bits": 8},
                {"symmetric": False},
                {"actorder": "group"},
                {"strategy": "channel", "group_size": None},
                {"group_size": 12},
                {"type": "float"},
                {"another": 1},
            )
        ),
        {"another": 1},
    ],
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_configuration_that_says_anything_else_is_refused(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "plain", "qwen3", 37)
    for change in [*CHANGES[kind], {"quant_method": None}]:
        configure(folder, {**KIND_OF[kind][0], **change})
        with pytest.raises(
            ConfigError, match=r"config.json: quantization_config = .*not supported; read are FP8"
        ):
            read_hf_config(str(folder))


def without(end: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda stored: {name: tensor for name, tensor in stored.items() if not name.endswith(end)}


def turned(end: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda stored: {
        name: tensor[:-1].contiguous() if name.endswith(end) else tensor for name, tensor in stored.items()
    }


def of_type(end: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda stored: {
        name: tensor.to(dtype) if name.endswith(end) else tensor for name, tensor in stored.items()
    }


BROKEN: dict[str, list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]]] = {
    "fp8": [
        (without("up_proj.weight_scale_inv"), r"up_proj.weight_scale_inv is missing"),
        (turned("up_proj.weight_scale_inv"), "which is not of the blocks of"),
        (of_type("_scale_inv", torch.float16), "its factors are of F16"),
        (
            lambda stored: {**stored, "model.a.weight_scale_inv": torch.ones(1, 1)},
            "model.a.weight is missing",
        ),
    ],
    "compressed-tensors": [
        (without("up_proj.weight_scale"), r"up_proj.weight_scale is missing"),
        (without("up_proj.weight_shape"), r"up_proj.weight_shape is missing"),
        (turned("up_proj.weight_scale"), "which is not of the groups of"),
        (of_type("weight_packed", torch.int64), "weight_packed is of type I64"),
    ],
}


def test_parts_that_are_missing_or_do_not_fit_are_named(
    quantised: tuple[str, Path, dict[str, Tensor]],
) -> None:
    kind, folder, _ = quantised
    arch, stored = architecture(read_hf_config(str(folder))), load_file(folder / "model.safetensors")
    for change, reason in BROKEN[kind]:
        save_file(change(dict(stored)), folder / "model.safetensors")
        with pytest.raises(ConfigError, match=reason):
            FolderTensors(str(folder), arch)


def test_a_configuration_of_quantised_weights_without_any_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "plain", "qwen3", 37)
    configure(folder, FP8)
    with pytest.raises(
        ConfigError, match="says how weights are quantised, and none of them is; remove the key"
    ):
        FolderTensors(str(folder), architecture(read_hf_config(str(folder))))


@pytest.mark.parametrize(("kind", "refused"), [("sglang", True), ("embedded", False)])
def test_sglang_would_serve_them_quantised(
    kind: str, refused: bool, quantised: tuple[str, Path, dict[str, Tensor]]
) -> None:
    _, folder, _ = quantised
    config = RunConfig.model_validate({**GOOD, "engines": {"kind": kind}})
    problems = list(check_model._quantised(config, str(folder)))
    assert [problem.field for problem in problems] == ["model.path"] * refused
