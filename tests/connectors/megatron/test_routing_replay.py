"""Rollout routing replay: the trainer's passes follow given experts, in every family and layout, as Hugging Face's model does when
its routers are forced to take them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.plain_rl import grpo_loss
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.adapters import FlatPairs, write_peft
from millrace.connectors.trainers.chunks import hash_of
from millrace.connectors.trainers.megatron.conversion.conversion import Conversion, Order
from millrace.connectors.trainers.packing import read_rows
from millrace.core.config.trainer import Lora
from millrace.core.families.adapters import targeted
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.registry import BUILT_IN
from millrace.core.families.routed_experts import RoutingFormat
from tests.connectors.megatron.test_layout_parity import REFUSED, SPLITS, gradients, stored
from tests.support.plain_trainer import Plain
from tests.support.trainer_ranks import (
    RankFailedError,
    Workers,
    configuration,
    log_probabilities,
    samples,
    write_batch,
)

MIXTURES = [family.name for family in BUILT_IN if family.has("router.weight")]


def form_of(folder: Path) -> RoutingFormat:
    form = RoutingFormat.of(architecture(read_hf_config(str(folder))))
    assert form is not None
    return form


def with_experts(rows: list[dict[str, Any]], form: RoutingFormat, seed: int = 0) -> list[dict[str, Any]]:
    """The rows with experts at random, of all tokens but the last."""
    draw = random.Random(seed)
    for row in rows:
        each = [
            [draw.sample(range(form.experts), form.used) for _ in form.expert_layers]
            for _ in row["tokens"][:-1]
        ]
        row["routed_experts"] = np.array(each, form.dtype).tobytes()
    return rows


def experts_of(row: dict[str, Any], form: RoutingFormat) -> Tensor:
    """The row's experts [tokens, layers with experts, k]; the last token's are those of the one before."""
    rows = form.read(row["routed_experts"], len(row["tokens"]), 0)
    return torch.tensor(np.concatenate([rows, rows[-1:]]).astype(np.int64))


@contextmanager
def forced(experts: Tensor, every: int) -> Iterator[None]:
    """Hugging Face's routers over `every` experts take these of the sequence that passes, weighed by their own scores."""
    real, layers = torch.topk, iter(experts.unbind(1))

    def topk(values: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if values.shape[-1] != every:  # groups of experts
            return real(values, k, *args, **kwargs)
        chosen = next(layers)
        return values.gather(1, chosen), chosen

    torch.topk = topk  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.topk = real
    assert next(layers, None) is None, "a layer did not ask for its experts"


class Forced(Plain):
    """Hugging Face's model with the experts of rows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.form = form_of(folder)

    def logprobs(self, row: dict[str, Any], model: Any = None, temperature: float = 1.0) -> Tensor:
        with forced(experts_of(row, self.form), self.form.experts):
            return super().logprobs(row, model, temperature)

    def gradients_of(self, rows: Sequence[dict[str, Any]], folder: Path) -> dict[str, Tensor]:
        """Of the mean loss, by the names of stored tensors."""
        losses = []
        for row in rows:
            new_R = self.logprobs(row)
            mask = torch.tensor([row["loss_mask"]], dtype=torch.float32)
            losses.append(
                grpo_loss(new_R[None], new_R.detach()[None], torch.tensor([row["advantage"]]), mask)
            )
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        self.model.save_pretrained(folder)
        return stored(folder)


def replaying(folder: Path, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """The configuration of a trainer that replays."""
    config = configuration(folder, ranks, optimizer={"distributed": False}, **changes)
    config["rollout"]["routing_replay"] = True
    return config


CASES = [
    *(("qwen3_moe", split, "none") for split in SPLITS if ("qwen3_moe", split) not in REFUSED),
    *((kind, "tp1", "none") for kind in MIXTURES if kind != "qwen3_moe"),
    *((kind, "pp2 ep2", "full") for kind in MIXTURES if kind != "qwen3_moe"),
    ("qwen3_moe", "tp1", "full"),
    ("qwen3_moe", "tp1", "selective"),
    ("qwen3_moe", "vpp2", "full"),
]
USUAL = {
    ("qwen3_moe", "tp1", "selective"),
    ("qwen3_moe", "vpp2", "full"),
    ("qwen3_moe", "tp2 ep2", "none"),
    ("qwen3_moe", "pp2 cp2", "none"),
    ("deepseek_v3", "tp1", "none"),
    ("gpt_oss", "tp1", "none"),
}


@pytest.mark.parametrize(
    ("kind", "split", "recompute"),
    [case if case in USUAL else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_log_probabilities_and_gradients_follow_given_experts(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, kind: str, split: str, recompute: str
) -> None:
    each = SPLITS[split]
    folder = model(kind, **each.model)
    rows = with_experts(samples(1), form_of(folder))
    url, plain = write_batch(tmp_path / "batch", rows), Forced(folder)
    expected = {row["sample_id"]: plain.logprobs(row).tolist() for row in rows}
    config = replaying(folder, each.ranks, parallel=each.parallel, megatron=each.options, recompute=recompute)
    with workers.group(config) as group:
        logprobs = group.run(log_probabilities, url)[0]
        group.run(gradients, url, str(tmp_path / "gradients"))
        (agreement, *others) = group.run(agreed)
    for name, values in expected.items():
        assert logprobs[name] == pytest.approx(values, abs=1e-4), name
    ours, theirs = stored(tmp_path / "gradients"), plain.gradients_of(rows, tmp_path / "plain")
    assert sorted(ours) == sorted(theirs)
    for name, grad in theirs.items():
        assert float((ours[name] - grad).abs().max()) < 1e-4 * max(1e-2, float(grad.abs().max())), name
    assert 0 < agreement < 1, "drawn at random, some experts are the router's own"
    assert set(others) <= {agreement}


def agreed(rank: Any) -> float:
    """What a step on the batch that the rank has read reports."""
    (url, sha256), rows = rank._rows
    with rank._working("train"):
        metrics = rank.learner.forward_backward(rank.learner.rank_batch(1, url, rows, sha256), 1)
    return float(metrics["routing_agreement"])


def values_of(rank: Any, url: str, name: str) -> dict[str, list[float]]:
    """Values of a step's response tokens, by sample."""
    with rank._working("train"):
        batch = rank.learner.rank_batch(1, url, rank._read(url))
    parts = batch.per_token[name].cpu().split([row.response_length for row in batch.rows])
    return {row.sample_id: part.tolist() for row, part in zip(batch.rows, parts, strict=True)}


def test_the_old_policy_replays_and_the_reference_and_a_teacher_choose_themselves(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    """The reference is the policy's own weights here, and the guard takes the KL that other experts give."""
    folder = model("qwen3_moe")
    rows = with_experts(samples(1), form_of(folder))
    url = write_batch(tmp_path / "batch", rows)
    algorithm = {
        "kl_coef": 0.1,
        "old_logprobs": "recompute",
        "distillation_coef": 0.5,
        "teacher": str(folder),
    }
    forced, own = Forced(folder), Plain(folder)
    expected = {"old": forced, "ref": own, "teacher": own}
    with workers.group(replaying(folder, algorithm=algorithm)) as group:
        found = {name: group.run(values_of, url, name)[0] for name in expected}
        metrics = group.train([1], url)[0]
    for name, plain in expected.items():
        for row in rows:
            assert found[name][row["sample_id"]] == pytest.approx(plain.logprobs(row).tolist(), abs=1e-4), (
                name
            )
    assert metrics["kl"] > 1e-6, "more than the guard stands of a reference that is the policy"


def spoiled(rows: list[dict[str, Any]], form: RoutingFormat) -> dict[str, tuple[bytes | None, str]]:
    """Other bytes for a row with a loss on its last token, and why they are refused."""
    (row,) = (row for row in rows if row["sample_id"] == "s1-1")
    data = row["routed_experts"]
    return {
        "none": (None, "it was stored without any"),
        "too few": (data[: -form.width], "of which"),
        "half a row": (data[:-1], "are no rows"),
        "one for the last token": (data + data[: form.width], "rows for"),
        "no such expert": (b"\x09" * len(data), "row 0 has expert 9"),
    }


@pytest.mark.parametrize(
    "case", ["none", "too few", "half a row", "one for the last token", "no such expert"]
)
def test_a_batch_whose_experts_do_not_fit_is_refused_by_name(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    folder = model("qwen3_moe")
    form = form_of(folder)
    rows = with_experts(samples(1), form)
    data, reason = spoiled(rows, form)[case]
    changed = [{**row, "routed_experts": data} if row["sample_id"] == "s1-1" else row for row in rows]
    url = write_batch(tmp_path / "batch", changed)
    with workers.group(replaying(folder)) as group, pytest.raises(RankFailedError) as caught:
        group.train([1], url)
    assert "sample s1-1 has no experts that could be replayed" in str(caught.value)
    assert reason in str(caught.value)


def test_early_passes_count_only_for_the_same_experts(model: Callable[..., Path], tmp_path: Path) -> None:
    """With pipeline.eager: a chunk's hash covers its experts."""
    form = form_of(model("qwen3_moe"))
    hashes = []
    for seed in (0, 0, 1):
        url = write_batch(tmp_path / f"{len(hashes)}", with_experts(samples(1), form, seed))
        hashes.append(
            hash_of(read_rows(Store(str(Path(url).parent)).read_table("batch.parquet", "batch")), 0)
        )
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.slow
def test_adapters_of_experts_follow_given_experts(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    folder, lora = model("qwen3_moe"), Lora(rank=3, alpha=6.0, targets=r".*\.experts\..*_proj")
    shape, draws = architecture(read_hf_config(str(folder))), torch.Generator().manual_seed(1)
    pairs = {
        one.name: (
            torch.randn(3, one.inputs, generator=draws) * 0.3,
            torch.randn(one.outputs, 3, generator=draws) * 0.3,
        )
        for one in targeted(shape, lora.targets)
    }
    (tmp_path / "adapters").mkdir()
    write_peft(tmp_path / "adapters", FlatPairs.of(pairs), lora, shape, str(folder))
    Conversion(Order(tmp_path / "adapters", tmp_path / "merged", folder, to="hf", merge=True)).convert()
    rows = with_experts(samples(1), form_of(folder))
    url, plain = write_batch(tmp_path / "batch", rows), Forced(tmp_path / "merged")
    started = {**lora.model_dump(mode="json"), "path": str(tmp_path / "adapters")}
    with workers.group(replaying(folder, 2, parallel={"expert": 2}, lora=started)) as group:
        found = group.run(log_probabilities, url)[0]
    with torch.no_grad():
        for row in rows:
            assert found[row["sample_id"]] == pytest.approx(plain.logprobs(row).tolist(), abs=2e-5)
