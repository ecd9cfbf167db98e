"""AdamW on the host beside a GPU: steps differ by rounding alone, also after sleeping, and checkpoints load under other fractions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from benchmarks.gpu.offload import differences, fp32_weights, learning_rate
from millrace.core.contracts.task_records import StepRequest
from tests.support import trainer_ranks  # noqa: E402
from tests.support.distances import distance  # noqa: E402

CLIPPED, FREE = 0.05, 1e6
LAST_PLACES = 8.0  # by which weights differ after one step, at most; 5 on an H200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, **heads, vocab_size=trainer_ranks.VOCAB)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def rank_of(model: Path, offload: float, clip: float) -> Iterator[Any]:
    from millrace.connectors.trainers.megatron.rank import TrainerRank

    settings = trainer_ranks.configuration(
        model,
        device="cuda",
        dtype="bfloat16",
        max_pack_tokens=256,
        threads=4,
        optimizer={"clip_grad": clip, "offload": offload},
    )
    rank = TrainerRank(settings, 0, 1)
    rank.setup(rank.address())
    try:
        yield rank
    finally:
        rank.shutdown()


def weights_of(rank: Any) -> list[torch.Tensor]:
    return [each.detach().cpu().clone() for each in fp32_weights(rank)]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("batches")
    return [trainer_ranks.write_batch(folder / str(step), trainer_ranks.samples(step)) for step in (1, 2, 3)]


@pytest.mark.parametrize("clip", [CLIPPED, FREE])
@pytest.mark.parametrize("offload", [0.5, 1.0])
def test_steps_differ_by_rounding_alone_also_after_sleeping(
    offload: float, clip: float, model: Path, urls: list[str]
) -> None:
    made = []
    for fraction in (0.0, offload):
        with rank_of(model, fraction, clip) as rank:
            on_gpu = sum(each.numel() for each in fp32_weights(rank) if each.is_cuda)
            assert on_gpu <= (1 - fraction) * sum(each.numel() for each in fp32_weights(rank))
            norms = [rank.train(StepRequest(1, urls[0]))["grad_norm"]]
            first = weights_of(rank)
            for version in (2, 3):
                rank.offload()
                norms.append(rank.train(StepRequest(version, urls[version - 1]))["grad_norm"])
            rate = learning_rate(rank)
            made.append(
                (norms, first, weights_of(rank), [p.detach().clone() for p in rank.policy.parameters()])
            )
    (norms, first, last, model_weights), (again, once, end, other) = made
    assert again[0] == norms[0]
    assert again == pytest.approx(norms, rel=1e-2)
    assert differences(first, once, "cuda", rate)["last_places"] <= LAST_PLACES
    for one, another in zip([*last, *model_weights], [*end, *other], strict=True):
        assert distance(one, another) < 5e-3


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_a_checkpoint_holds_the_same_under_another_fraction(
    before: float, after: float, model: Path, urls: list[str], tmp_path: Path
) -> None:
    with rank_of(model, before, CLIPPED) as rank:
        rank.train(StepRequest(1, urls[0]))
        rank.save(str(tmp_path / "saved"))
        saved = weights_of(rank)
        norm = rank.train(StepRequest(2, urls[1]))["grad_norm"]
    with rank_of(model, after, CLIPPED) as rank:
        assert rank.load(str(tmp_path / "saved")) == 1
        assert all(torch.equal(one, other) for one, other in zip(saved, weights_of(rank), strict=True))
        assert rank.train(StepRequest(2, urls[1]))["grad_norm"] == norm
        rank.train(StepRequest(3, urls[2]))
