"""Twenty steps of adapters on megatron's ranks beside the library `peft` on Hugging Face's model, and its reading of our folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.plain_rl import adamw
from tests.connectors.megatron.test_adapters import (
    EVERY,
    EXPERTS,
    FEED_FORWARD,
    LORA,
    settings,
)
from tests.connectors.megatron.test_parity import policy_loss
from tests.support.adapter_checks import adapters
from tests.support.plain_trainer import LR, Plain
from tests.support.trainer_ranks import Workers, log_probabilities, samples, write_batch

STEPS = 20
KL = 0.1
SPLIT = [
    ("qwen3", "tp2 sp", EVERY),
    ("qwen3", "pp2", EVERY),
    ("qwen3", "cp2", EVERY),
    *(("qwen3_moe", layout, EXPERTS) for layout in ("tp2 sp", "pp2", "ep2", "ep2 cut experts")),
]
READ = {  # families with experts whose adapters peft reads, and targets
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS,
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": EXPERTS.replace("q|k|v|o", "o"),
    "deepseek_v3": EXPERTS,
    "qwen3_next": FEED_FORWARD,
}
FUSED = ".experts.base_layer"  # peft's name of the pairs of gate and up projections
pytestmark = pytest.mark.slow


class PeftPolicy(Plain):
    """A policy with adapters by `peft`; the reference is the model without them."""

    def __init__(self, model: Path, folder: Path) -> None:
        peft = pytest.importorskip("peft", reason="pip install 'millrace[peft]'")
        super().__init__(model)
        self.model = peft.PeftModel.from_pretrained(self.model, folder, is_trainable=True)
        self.optimizer = adamw([each for each in self.model.parameters() if each.requires_grad], LR, 0.01)
        for name, each in self.model.named_parameters():
            if name.endswith(f"{FUSED}.lora_B.default.weight"):
                each.register_hook(_of_each_alone)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapters, under their names in a folder."""
        named = self.model.named_parameters()
        every = {name.replace(".default.", "."): each.detach() for name, each in named if each.requires_grad}
        return {name: one for stored, each in every.items() for name, one in _apart(stored, each)}


def _of_each_alone(grad: torch.Tensor) -> torch.Tensor:
    """peft has gate and up projections in one pair of twice the rank, and would train what one adds to the other."""
    parts = grad.view(2, len(grad) // 2, 2, LORA["rank"], -1)
    kept = torch.eye(2)[:, None, :, None, None]
    return (parts * kept).view_as(grad)


def _apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs that peft has in one: of all experts of a layer, and of their gate and up projections."""
    layer, of_experts, rest = name.partition(".experts.")
    if not of_experts:
        yield name, tensor
        return
    rank, side = LORA["rank"], rest[-len("A.weight")]
    kinds = ["gate_proj", "up_proj"] if rest.startswith("base_layer") else ["down_proj"]
    wide = rank * len(kinds)
    if side == "A":
        each = tensor.view(-1, wide, tensor.shape[1])
    else:
        each = tensor.view(len(tensor), wide, -1).permute(2, 0, 1)
    for expert, whole in enumerate(each):
        for at, kind in enumerate(kinds):
            rows = whole.chunk(len(kinds))[at]
            own = rows if side == "A" else rows.chunk(len(kinds), 1)[at]
            yield f"{layer}.experts.{expert}.{kind}.lora_{side}.weight", own


@pytest.mark.parametrize(("kind", "layout", "targets"), SPLIT)
def test_twenty_steps_are_those_of_peft(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, kind: str, layout: str, targets: str
) -> None:
    folder = model(kind)
    config = settings(folder, layout, targets, algorithm={"kl_coef": KL})
    assert_twenty_steps_are_those_of_peft(workers, config, folder, tmp_path)


def assert_twenty_steps_are_those_of_peft(
    workers: Workers, config: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """config: of ranks with adapters beside the folder's model, and a KL coefficient of KL."""
    batches = [write_batch(tmp_path / str(step), samples(step)) for step in range(1, STEPS + 1)]
    with workers.group(config) as group:
        group.call("export", str(tmp_path / "first"), 0)
        ours: list[dict[str, Any]] = [
            group.train([step], batches[step - 1])[0] for step in range(1, STEPS + 1)
        ]
        scored = group.run(log_probabilities, batches[0])[0]
        group.call("export", str(tmp_path / "last"), STEPS)
    policy = PeftPolicy(folder, tmp_path / "first")
    for step, found in enumerate(ours, start=1):
        loss = policy_loss(policy, samples(step), {}, KL)
        assert found["loss"] == pytest.approx(loss.item(), rel=2e-3, abs=2e-5), step
        assert found["grad_norm"] == pytest.approx(policy.step(loss), rel=2e-3), step
    last = adapters(tmp_path / "last")
    assert last.keys() == policy.tensors().keys()
    for name, expected in policy.tensors().items():
        assert float((last[name] - expected).abs().mean()) < LR / 20, name
    again = PeftPolicy(folder, tmp_path / "last")
    with torch.no_grad():
        for row in samples(1):
            assert scored[row["sample_id"]] == pytest.approx(again.logprobs(row).tolist(), abs=2e-5)


@pytest.mark.parametrize("kind", READ)
def test_peft_reads_adapters_of_experts_and_has_the_trainers_logits(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, kind: str
) -> None:
    folder = model(kind)
    with workers.group(settings(folder, "ep2", READ[kind])) as group:
        group.train([1], batch.format(1))
        scored = group.run(log_probabilities, batch.format(2))[0]
        group.call("export", str(tmp_path / "adapters"), 1)
    policy, moved = PeftPolicy(folder, tmp_path / "adapters"), 0.0
    with torch.no_grad():
        for row in samples(2):
            found = policy.logprobs(row)
            assert scored[row["sample_id"]] == pytest.approx(found.tolist(), abs=2e-5)
            moved = max(moved, float((found - policy.logprobs(row, policy.reference)).abs().max()))
    assert moved > 1e-4
