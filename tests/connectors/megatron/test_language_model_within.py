"""A checkpoint that also sees pictures: its language model is trained as the same one alone, and the rest comes back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.connectors.engines.embedded.model import Decoder, Weights, read_shape, read_tensors
from millrace.connectors.huggingface.tiny_vision import KINDS, build_tiny_vision
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config, resolved, undeclared_keys
from tests.connectors.megatron.test_buckets import passed
from tests.connectors.megatron.test_conversion import convert, load_weights, tensors_of
from tests.connectors.megatron.test_kept_tensors import bytes_of
from tests.support.tiny_models import stacked
from tests.support.trainer_ranks import Workers, configuration, log_probabilities, samples, write_batch

VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 32}
FORMS = {
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
}  # published ones, and how names of their classes start
OUTER = {
    "tie_word_embeddings": False,
    "image_token_id": 30,
    "video_token_id": 31,
    "vision_start_token_id": 32,
    "vision_end_token_id": 33,
    "vision_config": VISION,
}
INNER = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
SECTIONS = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}


def longer(name: str) -> str:
    """The name of a language model's tensor in such a checkpoint."""
    return name.replace("model.", "model.language_model.") if name.startswith("model.") else name


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(form: str, model: Callable[..., Path]) -> Path:
    """The language model as a checkpoint of its own."""
    return model(f"{form}_text")


@pytest.fixture(scope="module")
def folder(form: str, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As they are published, with a tower for pictures and tensors that predict tokens after the next one."""
    made = tmp_path_factory.mktemp("pictures")
    of_language = stacked(load_file(alone / "model.safetensors"))
    tensors = {longer(name): tensor for name, tensor in of_language.items()}
    tensors |= {
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(48, 16),
        "model.visual.blocks.0.attn.qkv.bias": torch.randn(48).bfloat16(),
        "mtp.fc.weight": torch.randn(32, 64),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 48, 32),
    }
    save_file(tensors, made / "model.safetensors")
    inner = {**json.loads((alone / "config.json").read_text()), **INNER}
    inner["rope_parameters"] |= SECTIONS
    del inner["architectures"]
    outer = {"architectures": [f"{FORMS[form]}ForConditionalGeneration"], "model_type": form, **OUTER}
    (made / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    return made


def test_a_step_changes_the_language_model_as_the_same_one_alone(
    workers: Workers, alone: Path, folder: Path, tmp_path: Path
) -> None:
    url, found = write_batch(tmp_path / "batch", samples(1)), {}
    for name, source in (("alone", alone), ("within", folder)):
        with workers.group(configuration(source, 2, parallel={"pipeline": 2})) as group:
            found[name] = group.run(log_probabilities, url)[0]
            group.call("export", str(tmp_path / f"{name}, same"), 0)
            sent = group.run(passed)
            group.train([1], url)
            group.call("export", str(tmp_path / name), 1)
    assert found["within"] == found["alone"]
    before, same, after = (
        bytes_of(each) for each in (folder, tmp_path / "within, same", tmp_path / "within")
    )
    assert before.keys() == same.keys()
    assert all(same[name].equal(tensor) for name, tensor in before.items())
    others = stacked(bytes_of(tmp_path / "alone"))
    kept = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert after.keys() == {longer(name) for name in others} | kept
    assert all(after[longer(name)].equal(tensor) for name, tensor in others.items())
    assert {name for name in before if after[name].equal(before[name])} == kept
    for buckets in sent:
        assert {name for tensors, *_ in buckets for name in tensors} == before.keys() - kept


def test_transformers_loads_the_language_model_of_an_export(
    workers: Workers, alone: Path, folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    with workers.group(configuration(folder, dtype="bfloat16")) as group:
        group.call("export", str(tmp_path / "export"), 0)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["text_config"]["dtype"] == "bfloat16"
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        plain, exported = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16)(tokens).logits
            for each in (alone, tmp_path / "export")
        )
    assert torch.equal(plain, exported)


def test_the_engine_computes_the_language_model(alone: Path, folder: Path) -> None:
    tokens = torch.arange(16)[None] % 37
    hidden: list[Tensor] = []
    for each in (alone, folder):
        shape = read_shape(each)
        hidden.append(Decoder(Weights(shape, read_tensors(each, shape, None))).prefill(tokens)[0])
    assert torch.equal(*hidden)


def test_every_tensor_comes_back_from_torch_dist_and_experts_one_by_one(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back")
    convert(tmp_path / "there", tmp_path / "described", folder)
    back, described = (tensors_of(tmp_path / name) for name in ("back", "described"))
    assert not any(name.endswith("layers.0.mlp.experts.down_proj") for name in back if name[:3] != "mtp")
    assert back.keys() == described.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in described.items())
    together, original = stacked(back), tensors_of(folder)
    assert together.keys() == original.keys()
    assert all(together[name].dtype == tensor.dtype for name, tensor in original.items())
    assert all(torch.equal(together[name], tensor) for name, tensor in original.items())
    convert(folder, tmp_path / "other", to="hf", dtype=torch.float32)
    assert tensors_of(tmp_path / "other").keys() == original.keys()


@pytest.mark.slow
def test_ranks_load_what_was_converted_and_what_they_save_is_the_model_again(
    workers: Workers, folder: Path, tmp_path: Path
) -> None:
    convert(folder, tmp_path / "converted")
    with workers.group(configuration(folder, 2, parallel={"pipeline": 2})) as group:
        group.call("save", f"{tmp_path}/saved")
        differing = group.run(load_weights, str(tmp_path / "converted" / "release"))
    assert not any(differing)
    convert(tmp_path / "saved", tmp_path / "again", folder)
    again, original = stacked(tensors_of(tmp_path / "again")), tensors_of(folder)
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in original.items())


def test_keys_of_the_language_model_are_read_where_they_are(form: str, alone: Path, folder: Path) -> None:
    plain = architecture(read_hf_config(str(alone)))
    within = replace(plain, family=form, experts_together=form == "qwen3_5_moe")
    assert architecture(read_hf_config(str(folder))) == within
    config = json.loads((folder / "config.json").read_text())
    assert undeclared_keys(config) == []
    config["text_config"]["no_such_key"] = 3
    assert undeclared_keys({**config, "other": 4}) == ["no_such_key", "other"]


@pytest.mark.parametrize(
    ("outer", "inner", "named"),
    [
        ({"text_config": 3}, {}, "text_config = 3"),
        ({"tie_word_embeddings": True}, {}, "text_config.tie_word_embeddings = false"),
        ({}, {"attn_output_gate": False}, "attn_output_gate = false"),
        ({}, {"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({}, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"architectures": ["Qwen3_5ForCausalLM"]}, {}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, "quantization_config"),
    ],
)
def test_what_is_another_model_is_refused(
    folder: Path, outer: dict[str, Any], inner: dict[str, Any], named: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= inner
    with pytest.raises(ConfigError, match=f"config.json: {named}"):
        resolved({**config, **outer}, "test")


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        *(pytest.param(kind, {}, id=kind) for kind in KINDS),
        pytest.param("qwen3_vl_moe", {"expert": 2}, id="experts of two", marks=pytest.mark.slow),
        pytest.param(
            "qwen3_vl_moe", {"tensor": 2, "sequence": True}, id="tensors of two", marks=pytest.mark.slow
        ),
    ],
)
def test_a_model_that_sees_is_trained_on_text_and_keeps_its_tower(
    workers: Workers, tmp_path: Path, kind: str, parallel: dict[str, Any]
) -> None:
    from transformers import AutoModelForImageTextToText

    folder, rows = build_tiny_vision(tmp_path / "model", kind, hidden=32), samples(1)
    url = write_batch(tmp_path / "batch", rows)
    with workers.group(configuration(folder, 2 if parallel else 1, parallel=parallel)) as group:
        found: dict[str, Any] = {}
        for part in group.run(log_probabilities, url):
            found |= part
        group.call("export", str(tmp_path / "same"), 0)
        group.train([1], url)
        group.call("export", str(tmp_path / "out"), 1)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    for row in rows:
        tokens = torch.tensor([row["tokens"]])
        with torch.no_grad():
            logprobs = model(input_ids=tokens).logits[0].log_softmax(-1)
        length = row["response_length"]
        expected = logprobs[-length - 1 : -1].gather(1, tokens[0, -length:, None])[:, 0]
        assert found[row["sample_id"]] == pytest.approx(expected.tolist(), abs=1e-5)
    before, same, after = (bytes_of(each) for each in (folder, tmp_path / "same", tmp_path / "out"))
    assert before.keys() == same.keys() == after.keys()
    assert all(same[name].equal(tensor) for name, tensor in before.items())
    kept = {name for name in before if after[name].equal(before[name])}
    assert kept == {name for name in before if "visual." in name}
