"""LoRA in plain PyTorch beside Hugging Face's models: linear layers and experts with pairs, from a folder in PEFT's form."""

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


class OnePair(torch.nn.Module):
    """The pair of one matrix of an expert."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.A, self.B = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())
        self.scale = scale

    def added(self) -> Tensor:
        return self.scale * self.B @ self.A


class ExpertsWithPairs(torch.nn.Module):
    """Experts that transformers holds in two tensors, with a pair for each matrix of each expert."""

    def __init__(self, experts: torch.nn.Module, pairs: dict[str, OnePair]) -> None:
        """pairs: by the end of the matrix's name, such as 3.down_proj; all of a kind, or none."""
        super().__init__()
        self.experts, self.pairs = experts.requires_grad_(False), pairs
        self._kept = torch.nn.ModuleList(pairs.values())
        self._numbers = sorted({int(name.partition(".")[0]) for name in pairs})

    def forward(self, *inputs: Tensor) -> Tensor:
        weights = {}
        for tensor, kinds in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            if f"0.{kinds[0]}" in self.pairs:
                each = [
                    torch.cat([self.pairs[f"{n}.{kind}"].added() for kind in kinds]) for n in self._numbers
                ]
                weights[tensor] = getattr(self.experts, tensor) + torch.stack(each)
        out: Tensor = torch.func.functional_call(self.experts, weights, inputs)
        return out


def add_pairs(model: Any, folder: Path) -> dict[str, LinearWithPair | OnePair]:
    """Freeze a model and add the pairs of a PEFT folder; by the names of the matrices."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    model.requires_grad_(False)
    made: dict[str, LinearWithPair | OnePair] = {}
    of_experts: dict[str, dict[str, OnePair]] = {}
    for name in sorted({key.removeprefix(PREFIX).rpartition(".lora_")[0] for key in stored}):
        above, _, last = name.rpartition(".")
        a, b = (stored[f"{PREFIX}{name}.lora_{side}.weight"] for side in "AB")
        scale = settings["lora_alpha"] / settings["r"]
        layer, experts, end = name.partition(".experts.")
        if experts:
            made[name] = of_experts.setdefault(layer, {})[end] = OnePair(a, b, scale)
            continue
        parent = model.get_submodule(above)
        made[name] = LinearWithPair(getattr(parent, last), a, b, scale)
        setattr(parent, last, made[name])
    for layer, pairs in of_experts.items():
        parent = model.get_submodule(layer)
        parent.experts = ExpertsWithPairs(parent.experts, pairs)
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
