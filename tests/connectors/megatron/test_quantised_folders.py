"""A checkpoint with quantised experts: trained on from their values, and exported in bfloat16 as an unquantised one is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.folder_tensors import FolderTensors
from tests.core.test_quantised import quantise
from tests.support.tiny_models import save_mxfp4_model, save_tiny_model
from tests.support.trainer_ranks import VOCAB, Workers, configuration

LAYOUTS = {
    "one rank": (1, {}),
    "experts over ranks": (2, {"expert": 2}),
    "stages": (2, {"pipeline": 2}),
    "tensors and experts": (2, {"tensor": 2, "sequence": True, "expert": 2}),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "experts over ranks" else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_an_export_has_the_values_under_the_names_of_an_unquantised_checkpoint(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    exported_in_bfloat16(workers, save_mxfp4_model(tmp_path / "model", VOCAB), tmp_path / "export", name)


@pytest.mark.parametrize("name", ["experts over ranks", pytest.param("stages", marks=pytest.mark.slow)])
def test_experts_in_fp8_that_are_stored_one_by_one_stay_so(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    """Qwen3.5's mixtures in FP8 store experts so, those in bfloat16 all experts of a layer together."""
    folder = save_tiny_model(tmp_path / "model", "qwen3_5_moe", VOCAB)
    tensors = load_file(folder / "model.safetensors")
    for layer in (
        each.removesuffix("down_proj") for each in list(tensors) if each.endswith("experts.down_proj")
    ):
        both, down = tensors.pop(f"{layer}gate_up_proj"), tensors.pop(f"{layer}down_proj")
        for expert, (gate, up) in enumerate(each.chunk(2) for each in both):
            of_expert = {"gate": gate, "up": up, "down": down[expert]}
            tensors |= {
                f"{layer}{expert}.{part}_proj.weight": each.clone() for part, each in of_expert.items()
            }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantise("fp8", folder)
    exported_in_bfloat16(workers, folder, tmp_path / "export", name)


def exported_in_bfloat16(workers: Workers, folder: Path, export: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    world, parallel = LAYOUTS[name]
    with workers.group(configuration(folder, world, parallel=parallel, dtype="bfloat16")) as group:
        group.call("export", str(export), 0)
    found = {key: value for path in export.glob("*.safetensors") for key, value in load_file(path).items()}
    source = FolderTensors(str(folder), architecture(read_hf_config(str(folder))))
    assert sorted(found) == sorted(source.stored | source.kept)
    assert all(torch.equal(found[key], source[key].bfloat16()) for key in found)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((export / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(export)
