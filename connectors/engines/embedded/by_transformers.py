"""A model of a family that core.families does not know, computed by transformers for the engine's slots.

Owns its weights, and passes over whole texts: a slot remembers the ids of its text, and every step computes the text anew, each row
by itself, so that its result depends on that row alone. For small models: a step costs what its text costs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.core.families.unknown import read_unknown

ROWS = 16  # of the product with the output layer, see `model`
SPAN = 16  # tokens per step of a text's length


@dataclass(frozen=True)
class TextShape:
    """What the engine reads of the model, and a cache of ids: one number a token in one layer."""

    family: str
    vocab: int
    positions: int
    layers: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    value_dim: int = 1
    delta: None = None
    delta_layers: tuple[int, ...] = ()


def text_shape(folder: Path, field: str) -> TextShape:
    """The shape of a folder's model. Raises ConfigError if its config.json does not say it."""
    found = read_unknown(str(folder), field)
    return TextShape(found.family, found.vocab, found.positions)


def stored_tensors(folder: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """All tensors of a folder's files, those of numbers in a type; None: as stored."""
    tensors = {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


class TransformersWeights:
    """Named tensors, and transformers' model with them."""

    def __init__(self, shape: TextShape, tensors: dict[str, Tensor], folder: Path) -> None:
        """folder: with the config.json of the model."""
        from transformers import AutoModelForCausalLM

        self.shape = shape
        self.tensors = tensors
        self.folder = folder
        self.dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
        # through files, since transformers fuses tensors of some families while it reads them
        with tempfile.TemporaryDirectory() as beside:
            shutil.copy(folder / "config.json", beside)
            save_file(tensors, Path(beside) / "model.safetensors", metadata={"format": "pt"})
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                beside,
                dtype=self.dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
            ).eval()


class TransformersDecoder:
    """Prefill and decode."""

    cache_dtype = torch.int64

    def __init__(self, weights: TransformersWeights) -> None:
        self.shape = weights.shape
        self.weights = weights

    @torch.inference_mode()
    def prefill(
        self, tokens: Tensor, lengths: Tensor | None = None, adapters: Sequence[Any] = ()
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
        """tokens [B, S] -> final hidden states [B, S, H], what a Cache holds of them, and no experts. adapters: none are loaded."""
        hidden = torch.stack([self._hidden(row) for row in tokens])
        ids = tokens[:, None, :, None]
        return hidden, [(ids, ids)], tokens.new_zeros(*tokens.shape, 0, 0)

    @torch.inference_mode()
    def decode(
        self, tokens: Tensor, positions: Tensor, cache: Any, adapters: Sequence[Any] = ()
    ) -> tuple[Tensor, Tensor]:
        """Next hidden states [M, H] of slots 0..M-1, given each slot's last token [M] and its position [M]; no experts."""
        ids, _ = cache.layers[0]
        ids[torch.arange(len(tokens)), 0, positions, 0] = tokens
        hidden = []
        for slot, at in enumerate(positions.tolist()):
            text = torch.zeros(-(-(at + 1) // SPAN) * SPAN, dtype=torch.long)
            text[: at + 1] = ids[slot, 0, : at + 1, 0]
            hidden.append(self._hidden(text)[at])
        return torch.stack(hidden), tokens.new_zeros(len(tokens), 0, 0)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [M, V] of hidden states [M, H]."""
        rows = hidden.shape[0]
        padded = torch.cat([hidden, hidden.new_zeros(-rows % ROWS, hidden.shape[1])])
        found: Tensor = self.weights.model.get_output_embeddings()(padded)[:rows].float()
        return found

    def _hidden(self, text: Tensor) -> Tensor:
        """Hidden states [S, H] of a text. What follows a token does not change its state."""
        body = self.weights.model.base_model
        states: Tensor = body(input_ids=text[None], use_cache=False).last_hidden_state[0]
        return states
