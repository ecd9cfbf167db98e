"""Twenty steps of adapters on megatron's ranks beside the library `peft` on Hugging Face's model, and its reading of our folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.plain_rl import adamw
from tests.connectors.megatron.test_adapters import LAYOUTS, adapters, settings
from tests.connectors.megatron.test_parity import policy_loss
from tests.support.plain_trainer import LR, Plain
from tests.support.trainer_ranks import Workers, log_probabilities, samples, write_batch

STEPS = 20
SPLIT = ["tp2 sp", "pp2", "cp2"]
pytestmark = pytest.mark.slow


class PeftPolicy(Plain):
    """A policy with adapters by `peft`; the reference is the model without them."""

    def __init__(self, model: Path, folder: Path) -> None:
        peft = pytest.importorskip("peft", reason="pip install 'millrace[peft]'")
        super().__init__(model)
        self.model = peft.PeftModel.from_pretrained(self.model, folder, is_trainable=True)
        self.optimizer = adamw([each for each in self.model.parameters() if each.requires_grad], LR, 0.01)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapters, under their names in a folder."""
        named = self.model.named_parameters()
        return {name.replace(".default.", "."): each.detach() for name, each in named if each.requires_grad}


@pytest.mark.parametrize("layout", SPLIT)
def test_twenty_steps_are_those_of_peft(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    folder = model()
    assert set(SPLIT) <= LAYOUTS.keys()
    batches = [write_batch(tmp_path / str(step), samples(step)) for step in range(1, STEPS + 1)]
    with workers.group(settings(folder, layout, algorithm={"kl_coef": 0.1})) as group:
        group.call("export", str(tmp_path / "first"), 0)
        ours: list[dict[str, Any]] = [
            group.train([step], batches[step - 1])[0] for step in range(1, STEPS + 1)
        ]
        scored = group.run(log_probabilities, batches[0])[0]
        group.call("export", str(tmp_path / "last"), STEPS)
    policy = PeftPolicy(folder, tmp_path / "first")
    for step, found in enumerate(ours, start=1):
        loss = policy_loss(policy, samples(step), {}, 0.1)
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
