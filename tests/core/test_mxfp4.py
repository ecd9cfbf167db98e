"""Experts that are stored as MXFP4: read as transformers reads them, whole or an expert at a time, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.core.errors import ConfigError
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.quantised.mxfp4 import Mxfp4
from tests.support.tiny_models import save_mxfp4_model


def test_values_are_those_of_transformers_bit_for_bit() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8)
    stored = {"x_blocks": blocks, "x_scales": scales}
    found = Mxfp4().values("x", (3, 64, 10), slice(1, 3), lambda name, rows: stored[name][rows])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales)[1:])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_mxfp4_model(tmp_path / "model", 37)


def shape_of(folder: Path) -> Architecture:
    return architecture(read_hf_config(str(folder)))


def test_a_folder_gives_tensors_whole_and_by_expert(folder: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = FolderTensors(str(folder), shape_of(folder))
    raw = load_file(folder / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{name}"
        expected = convert_moe_packed_tensors(raw[f"{name}_blocks"], raw[f"{name}_scales"])
        assert torch.equal(tensors[name], expected)
        assert all(torch.equal(tensors.expert(name, number), expected[number]) for number in range(4))
    bias = "model.layers.1.mlp.experts.down_proj_bias"
    assert torch.equal(tensors.expert(bias, 2), raw[bias][2])


NAME = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("missing", "more", "words"),
    [
        (f"{NAME}_scales", {}, f"tensor {NAME}_scales is missing"),
        (f"{NAME}_blocks", {}, f"tensor {NAME}_blocks is missing"),
        (f"{NAME}_scales", {f"{NAME}_scales": torch.zeros(4, 2, dtype=torch.uint8)}, "is not of the blocks"),
        (f"{NAME}_scales", {f"{NAME}_scales": torch.zeros(4, 32, 2)}, "scales of F32, not of U8"),
        ("none", {NAME: torch.zeros(4, 64, 32)}, f"tensor {NAME} is stored twice"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    folder: Path, missing: str, more: dict[str, Tensor], words: str
) -> None:
    raw = load_file(folder / "model.safetensors")
    raw.pop(missing, None)
    save_file({**raw, **more}, folder / "model.safetensors")
    with pytest.raises(ConfigError) as refusal:
        FolderTensors(str(folder), shape_of(folder))
    assert words in refusal.value.reason


def test_other_quantisations_are_refused(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "mxfp4", "block_size": 16}})
    )
    with pytest.raises(ConfigError, match="quantization_config"):
        read_hf_config(str(folder))
