"""LoRA in plain PyTorch beside Hugging Face's models: linear layers with a pair, from a folder in PEFT's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from examples.plain_rl import adamw
from tests.support.plain_trainer import LR, Plain

PREFIX = "base_model.model."


class LinearWithPair(torch.nn.Module):
    """W x + alpha / rank · B A x, with W frozen."""

    def __init__(self, linear: torch.nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        self.A, self.B = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = torch.nn.functional.linear(torch.nn.functional.linear(x, self.A), self.B) * self.scale
        return self.linear(x) + added


def add_pairs(model: Any, folder: Path) -> dict[str, LinearWithPair]:
    """Freeze a model and add the pairs of a PEFT folder; by the names of the matrices."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    model.requires_grad_(False)
    made = {}
    for name in sorted({key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in stored}):
        above, _, last = name.rpartition(".")
        parent = model.get_submodule(above)
        a, b = (stored[f"{PREFIX}{name}.lora_{side}.weight"] for side in "AB")
        made[name] = LinearWithPair(getattr(parent, last), a, b, settings["lora_alpha"] / settings["r"])
        setattr(parent, last, made[name])
    return made


class PlainLora(Plain):
    """A policy with adapters; the reference is the model without them."""

    def __init__(self, model: Path, adapters: Path, weight_decay: float = 0.01) -> None:
        super().__init__(model)
        self.pairs = add_pairs(self.model, adapters)
        parameters = [part for pair in self.pairs.values() for part in (pair.A, pair.B)]
        self.optimizer = adamw(parameters, LR, weight_decay)

    def tensors(self) -> dict[str, Tensor]:
        """The pairs under PEFT's names."""
        return {
            f"{PREFIX}{name}.lora_{side}.weight": getattr(pair, side).detach()
            for name, pair in self.pairs.items()
            for side in "AB"
        }
