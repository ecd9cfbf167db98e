"""A folder of adapters is read whole, or refused by the name of what is wrong in it: by engines, trainers and conversion alike."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import millrace.connectors
import millrace.core
from millrace.core.errors import ConfigError
from millrace.core.families.adapters import Matrix, holds_adapters, targeted
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.peft_folder import PLAIN, read_config, stored_pairs, tensor_names
from tests.support.tiny_models import save_tiny_model

GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": "somewhere"}
OTHERWISE: dict[str, Any] = {
    "bias": "all",
    "use_dora": True,
    "use_rslora": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 3},
    "alpha_pattern": {"q_proj": 3},
    "fan_in_fan_out": True,
}
FUSED = {
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "rank_pattern": {r".*\.mlp\.experts\.gate_up_proj": 4},
    "alpha_pattern": {r".*\.mlp\.experts\.gate_up_proj": 12},
}
NO_NUMBERS: tuple[Any, ...] = (0, -1, 10**400, "2", None, True, [2])


def written(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**GOOD, **changes}))
    return folder


def test_settings_are_read(tmp_path: Path) -> None:
    found = read_config(written(tmp_path / "a", **PLAIN), "x")
    assert (found.rank, found.alpha, found.base, found.scale) == (2, 6, "somewhere", 3)
    assert read_config(written(tmp_path / "a", base_model_name_or_path=None), "x").base == ""


@pytest.mark.parametrize("name", PLAIN)
def test_a_setting_that_makes_another_adapter_is_refused(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, **{name: OTHERWISE[name]})
    with pytest.raises(ConfigError, match=f"x = .*: adapter_config.json: {name} = .* is not supported"):
        read_config(folder, "x")


@pytest.mark.parametrize("parameters", [["mlp.experts.w1"], ["lm_head.weight"], "mlp.experts", [3], 3])
def test_parameters_without_pairs_of_matrices_are_refused(tmp_path: Path, parameters: Any) -> None:
    with pytest.raises(ConfigError, match="adapter_config.json: target_parameters = .* is not supported"):
        read_config(written(tmp_path, target_parameters=parameters), "x")


def test_parameters_whose_pairs_are_those_of_matrices_are_read(tmp_path: Path) -> None:
    linear = ["mlp.down_proj.weight", "mlp.shared_expert.up_proj.weight"]
    assert read_config(written(tmp_path, target_parameters=linear), "x").rank == 2
    assert read_config(written(tmp_path, **FUSED), "x").scale == 3
    for name, value in (
        ("target_parameters", linear),
        ("rank_pattern", {r".*\.mlp\.experts\.gate_up_proj": 3}),
        ("alpha_pattern", {".*": 12}),
    ):
        with pytest.raises(ConfigError, match=r"(rank|alpha)_pattern = .* is not supported"):
            read_config(written(tmp_path, **{**FUSED, name: value}), "x")


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
def test_rank_and_alpha_are_numbers_above_zero(tmp_path: Path, name: str) -> None:
    for value in (*NO_NUMBERS, *((0.5, float("inf")) if name == "r" else (float("nan"), float("inf")))):
        with pytest.raises(ConfigError, match=f"adapter_config.json: {name} = "):
            read_config(written(tmp_path, **{name: value}), "x")


@pytest.mark.parametrize(
    "text", ["", "[]", "1", "{}", '{"peft_type": "LOHA", "r": 2, "lora_alpha": 6}', "\ud800"]
)
def test_other_settings_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"adapter_config.json (cannot be read|describes no LoRA adapters)"):
        read_config(tmp_path, "x")


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> list[Matrix]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", 37)
    return targeted(architecture(read_hf_config(str(model))), r".*\.(q|o)_proj")


def some(matrices: list[Matrix]) -> dict[str, torch.Tensor]:
    tensors = {}
    for matrix in matrices:
        for name, shape in zip(
            tensor_names(matrix.name), ((2, matrix.inputs), (matrix.outputs, 2)), strict=True
        ):
            tensors[name] = torch.rand(shape)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pairs_are_read_as_they_are_stored(
    tmp_path: Path, matrices: list[Matrix], dtype: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in some(matrices[1:]).items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    pairs = stored_pairs(tmp_path, matrices, 2, "x")
    assert pairs.keys() == {matrix.name for matrix in matrices[1:]}
    for matrix, pair in pairs.items():
        for name, tensor in zip(tensor_names(matrix), pair, strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, tensors[name])


def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, matrices: list[Matrix]) -> None:
    tensors, (a, b) = some(matrices), tensor_names(matrices[0].name)
    of_experts = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"
    for changed, reason in (
        ({a: tensors[a][:, :-1].contiguous()}, rf"tensor {a} .* has shape .* is wanted"),
        ({b: tensors[b][:-1].contiguous()}, rf"tensor {b} .* has shape .* is wanted"),
        ({a: tensors[a].flatten()}, rf"tensor {a} .* has shape"),
        ({b: tensors[b].int()}, rf"tensor {b} .* is of type I32"),
        ({a: None}, rf"tensor {a} .* is missing"),
        ({b: None}, rf"tensor {b} .* is missing"),
        ({of_experts: tensors[a]}, rf"tensor {of_experts} .* is of no matrix"),
        ({"base_model.model.lm_head.weight": tensors[a]}, "lm_head.weight .* is of no matrix"),
    ):
        stored = {
            name: tensor.clone() for name, tensor in {**tensors, **changed}.items() if tensor is not None
        }
        save_file(stored, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=f"x = .*{reason}"):
            stored_pairs(tmp_path, matrices, 2, "x")
    for wrong in (b"", b"{}", b"\x08" + bytes(7) + b"{}      ", bytes(100)):
        (tmp_path / "adapter_model.safetensors").write_bytes(wrong)
        reason = r"(adapter_model.safetensors cannot be read|is missing)"
        if wrong[:1] == b"\x08":  # a file without tensors
            assert stored_pairs(tmp_path, matrices, 2, "x") == {}
            continue
        with pytest.raises(ConfigError, match=reason):
            stored_pairs(tmp_path, matrices, 2, "x")


def test_a_folder_of_a_model_is_none_of_adapters(tmp_path: Path) -> None:
    assert not holds_adapters(tmp_path)
    assert holds_adapters(written(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not holds_adapters(tmp_path)


def test_no_connector_knows_the_names_in_the_folder() -> None:
    naming = set()
    for package in (millrace.connectors, millrace.core):
        root = Path(package.__path__[0])
        for file in root.rglob("*.py"):
            texts = {
                node.value
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            if any(
                text in ("adapter_config.json", "adapter_model.safetensors", "base_model.model.")
                for text in texts
            ):
                naming.add(file.relative_to(root).as_posix())
    assert naming == {"families/adapters.py", "families/peft_folder.py"}
