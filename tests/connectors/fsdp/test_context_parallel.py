"""Context parallel ranks of FSDP's trainer: the loss and every gradient of one rank, of families and layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.connectors.fsdp.test_fsdp_trainer import fsdp, gradients
from tests.support import gpu_families
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import VOCAB, RankFailedError, Workers

FAMILIES = ["qwen3", "llama", "gemma3", "qwen3_moe", "deepseek_v3"]
LAYOUTS = {"cp 2": (2, 2), "cp 2 x dp 2": (4, 2)}  # ranks, and how many of them are context parallel
CASES = [pytest.param(kind, name, id=f"{kind}, {name}") for kind in FAMILIES for name in LAYOUTS]


@pytest.mark.parametrize(("kind", "layout"), slow_but(CASES, "gemma3, cp 2", "qwen3, cp 2 x dp 2"))
def test_loss_and_gradients_are_those_of_one_rank(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str, layout: str
) -> None:
    compared(workers, model(kind), batch, *LAYOUTS[layout])


def test_fewer_heads_of_keys_than_ranks_are_repeated(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    compared(workers, model("llama", num_key_value_heads=1), batch, 2, 2)


def compared(workers: Workers, folder: Path, batch: str, world: int, context: int) -> None:
    found, steps = [], []
    for ranks, size in ((1, 1), (world, context)):
        changes: dict[str, Any] = {"parallel": {"context": size}, "algorithm": {"kl_coef": 0.1}}
        with workers.group(fsdp(folder, ranks, **changes)) as group:
            found.append(group.run(gradients, batch.format(1)))
            steps.append([group.train([step], batch.format(step))[0] for step in (1, 2, 3)])
    (alone,), others = found
    for own in others:
        assert own.keys() == alone.keys()
        for name, gradient in alone.items():
            assert torch.equal(own[name], others[0][name]), "every rank has the same sum"
            assert (own[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
    for one, several in zip(*steps, strict=True):
        assert several["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=2e-6)
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert several["kl"] == pytest.approx(one["kl"], rel=1e-4, abs=1e-7)
        assert several["ratio_distance"] == 0
        assert several["tokens"] == one["tokens"]


def bfloat16_gap(rank: Any, url: str) -> float:
    """The mean difference of log-probabilities in bfloat16 and in float32 of the same weights."""
    from millrace.connectors.trainers.comparison import rounding_floor

    with rank._working("score"):
        return rounding_floor(rank.learner, rank._read(url))


@pytest.mark.slow
def test_the_rounding_floor_is_measured_as_on_one_rank(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    found = []
    for ranks, context in ((1, 1), (2, 2)):
        changes: dict[str, Any] = {"parallel": {"context": context}, "dtype": "bfloat16"}
        with workers.group(fsdp(model(), ranks, **changes)) as group:
            found.append(group.run(bfloat16_gap, batch.format(1))[0])
    assert found[1] == pytest.approx(found[0], rel=0.5)
    assert found[0] > 0


@pytest.mark.parametrize(
    ("kind", "heads", "words"),
    [
        ("llama4", 4, "layers of chunked_attention"),
        ("gemma3", 3, "does not divide the 3 attention heads"),
        ("bloom", 4, "an attention that transformers does not let others compute"),
    ],
)
def test_models_whose_attention_ranks_cannot_share_are_refused(
    workers: Workers, tmp_path: Path, kind: str, heads: int, words: str
) -> None:
    save(tmp_path, kind, heads)
    with (
        pytest.raises(RankFailedError, match=f"^ConfigError.*{words}"),
        workers.group(fsdp(tmp_path, 2, parallel={"context": 2})),
    ):
        pass


def save(folder: Path, kind: str, heads: int) -> None:
    """A tiny model of a family that core.families does not know."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 8 * heads, "num_hidden_layers": 2}
    more = {"intermediate_size": 48, "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": 8}
    model: Any
    if kind == "bloom":
        model = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, n_head=heads))
    elif kind == "llama4":
        experts = {"num_local_experts": 2, "intermediate_size_mlp": 48, "pad_token_id": 0}
        model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, **more, **experts))
    else:
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **more))
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu_families.FSDP_SPLITS)
def test_what_is_tried_on_two_gpus_passes_on_a_cpu(workers: Workers, tmp_path: Path, name: str) -> None:
    config, folder, steps = gpu_families.split(name, "cpu", tmp_path)
    with workers.group(config) as group:
        gpu_families.check_logprobs(group.run, folder, steps, "cpu")
        gpu_families.check_steps(group.run, folder, steps, "cpu", tmp_path)
