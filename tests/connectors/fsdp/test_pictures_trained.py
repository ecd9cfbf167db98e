"""FSDP's trainer sees the pictures of prompts as plain Hugging Face models do, sample by sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from examples.plain_rl import grpo_loss
from millrace.connectors.huggingface.tiny_vision import KINDS, VOCABULARY, build_tiny_vision
from millrace.connectors.storage.images import Picture, StoredImages, picture_of
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.contracts.images import image_names
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.images import ImageRules, image_rules
from millrace.core.families.tensors import weight_tensors
from tests.connectors.fsdp.test_fsdp_trainer import fsdp, gradients
from tests.support.noise import noise
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import RankFailedError, Workers, log_probabilities, samples, write_batch

SEEN = (1, 0, 2, 1)  # pictures of the samples, in turns


@pytest.fixture(scope="module", params=slow_but(KINDS, "qwen2_5_vl"))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("model"), request.param, hidden=32)


@pytest.fixture(scope="module")
def rules(folder: Path) -> ImageRules:
    return image_rules(str(folder))


def stored(root: Path, rules: ImageRules) -> list[Picture]:
    sizes = [(2, 1), (1, 2), (2, 2)]
    found = [
        picture_of(noise(w * rules.side, h * rules.side, seed), (w * rules.side, h * rules.side))
        for seed, (w, h) in enumerate(sizes)
    ]
    StoredImages(RunFolder(str(root), "a").store).keep(found)
    return found


def rows(rules: ImageRules, pictures: list[Picture]) -> list[dict[str, Any]]:
    """Samples whose prompts start with pictures."""
    made = []
    for number, row in enumerate(samples(1)):
        seen = [pictures[(number + at) % len(pictures)] for at in range(SEEN[number % len(SEEN)])]
        parts = [{"type": "image", "image": each.name} for each in seen]
        ids = [token % 80 for token in row["tokens"]]
        for each in reversed(seen):
            ids[1:1] = [
                rules.marks[2],
                *[rules.token] * rules.tokens(each.width, each.height),
                rules.marks[3],
            ]
        prompt = json.dumps([{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}])
        made.append({**row, "tokens": ids, "prompt": prompt})
    return made


def plain(
    rules: ImageRules, row: dict[str, Any], pictures: list[Picture], model: Any, *, whole: bool = False
) -> Tensor:
    """Log-probabilities of a sample's response tokens, of a forward pass of this sample alone.

    whole: among the whole vocabulary, else among what engines sample.
    """
    from millrace.connectors.storage.images import opened

    ids = torch.tensor([row["tokens"]])
    by_name = {each.name: each for each in pictures}
    content = json.loads(row["prompt"])[0]["content"]
    seen = [by_name[part["image"]] for part in content if part["type"] == "image"]
    more: dict[str, Any] = {}
    if seen:
        more["pixel_values"] = torch.cat([torch.from_numpy(rules.patches(opened(each.png))) for each in seen])
        more["image_grid_thw"] = torch.tensor([rules.grid(each.width, each.height) for each in seen])
        more["mm_token_type_ids"] = (ids == rules.token).int()
    logits = model(input_ids=ids, **more).logits[0]
    never = torch.zeros(VOCABULARY)
    if not whole:
        never[list(rules.marks)] = -torch.inf
    logprobs = (logits + never).log_softmax(-1)
    length = row["response_length"]
    return logprobs[-length - 1 : -1].gather(1, ids[0, -length:, None])[:, 0]


def seeing(folder: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    """Two ranks that see the pictures of a run among these."""
    config = fsdp(folder, 2, **changes)
    config["storage"]["root"] = str(runs)
    config["data"]["sources"][0]["images_key"] = "images"
    return config


@pytest.mark.parametrize("loss", ["clipped", "sft"])
def test_reference_answers_and_texts_have_the_whole_vocabulary(
    workers: Workers, folder: Path, rules: ImageRules, tmp_path: Path, loss: str
) -> None:
    pictures = stored(tmp_path / "runs", rules)
    made = rows(rules, pictures)
    url = write_batch(tmp_path / "batch", made)
    held_out = [
        HeldOutSample(row["tokens"], row["loss_mask"], tuple(image_names(json.loads(row["prompt"]))))
        for row in made
    ]
    changes = {"algorithm": {"loss": loss, "aggregation": "token_mean"}}
    with workers.group(seeing(folder, tmp_path / "runs", **changes)) as group:
        losses = group.call("losses", 0, held_out)[0]
        trained = group.train([1], url)[0]["loss"] if loss == "sft" else None
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    masks = [torch.tensor(row["loss_mask"]) for row in made]
    expected = [
        -float((plain(rules, row, pictures, model, whole=True) * mask).sum().detach())
        for row, mask in zip(made, masks, strict=True)
    ]
    assert losses == pytest.approx(expected, rel=1e-5)
    if trained is not None:
        assert trained == pytest.approx(sum(expected) / sum(int(mask.sum()) for mask in masks), rel=1e-5)


@pytest.mark.parametrize("parallel", [{}, {"context": 2}], ids=["data", "context"])
def test_log_probabilities_and_gradients_are_those_of_each_sample_alone(
    workers: Workers, folder: Path, rules: ImageRules, tmp_path: Path, parallel: dict[str, int]
) -> None:
    pictures = stored(tmp_path / "runs", rules)
    made = rows(rules, pictures)
    url = write_batch(tmp_path / "batch", made)
    with workers.group(seeing(folder, tmp_path / "runs", parallel=parallel)) as group:
        found = group.run(log_probabilities, url)[0]
        ours = group.run(gradients, url)[0]
        group.call("export", str(tmp_path / "out"), 0)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    losses = []
    for row in made:
        expected = plain(rules, row, pictures, model)
        assert np.allclose(found[row["sample_id"]], expected.detach().numpy(), atol=1e-5)
        mask = torch.tensor([row["loss_mask"]], dtype=torch.float32)
        advantage = torch.tensor([row["advantage"]])
        losses.append(grpo_loss(expected[None], expected.detach()[None], advantage, mask))
    torch.stack(losses).mean().backward()
    for name, each in model.named_parameters():
        if "visual" in name:
            assert name not in ours
            continue
        assert each.grad is not None
        assert (ours[name] - each.grad).norm() <= 1e-4 * each.grad.norm() + 1e-9, name
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("width", [16, 32])
def test_experts_of_which_shapes_tell_no_orientation_are_refused(
    workers: Workers, tmp_path: Path, width: int
) -> None:
    folder = build_tiny_vision(tmp_path, "qwen3_vl_moe", hidden=32)
    config = AutoConfig.from_pretrained(folder)
    config.text_config.moe_intermediate_size = width
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    with (
        pytest.raises(RankFailedError, match=r"^ConfigError.*model\.path.*its experts are square"),
        workers.group(fsdp(folder)),
    ):
        pass


def test_experts_that_are_stored_with_their_outputs_first_are_refused(tmp_path: Path) -> None:
    """As transformers writes them. SGLang turns them without looking."""
    folder = build_tiny_vision(tmp_path, "qwen3_vl_moe", hidden=32)
    AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(folder)
    shape = architecture(read_hf_config(str(folder)))
    with pytest.raises(
        ConfigError, match=r"down_proj .*has shape \[4, 32, 24\], the model has \[4, 24, 32\]"
    ):
        weight_tensors(str(folder), shape)


def sent_tensors(rank: Any) -> dict[str, Tensor]:
    """The tensors that a rank sends."""
    units = (unit for group in rank._sections() for unit in group.units())
    return {name: tensor.clone() for unit in units for name, tensor in unit}


def test_every_rank_sends_all_that_the_checkpoint_has(workers: Workers, folder: Path, tmp_path: Path) -> None:
    """Also the tower, which no step changes: an engine on a shared GPU loses all its weights when it gives its memory away."""
    stored = load_file(folder / "model.safetensors")
    tower = [name for name in stored if "visual." in name]
    assert tower
    with workers.group(seeing(folder, tmp_path / "runs")) as group:
        ranks = group.run(sent_tensors)
    assert len(ranks) == 2
    for sent in ranks:
        assert {name: each.shape for name, each in sent.items()} == {
            name: each.shape for name, each in stored.items()
        }
        assert all(sent[name].equal(stored[name]) for name in tower)
