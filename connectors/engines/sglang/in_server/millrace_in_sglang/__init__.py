"""Makes the routers of GLM's mixtures of experts follow updates of their weights. SGLang's process loads it.

SGLang 0.5.17 computes their logits from a copy of the weight in float32, which the first request makes. After an update of the
weights it would go on with that copy, and a checksum of the weights would not show it. Imports nothing of millrace.
"""

from __future__ import annotations

# SGLang loads one package with corrections, and a mixture may sleep too
import millrace_sleep_in_sglang  # type: ignore[import-not-found]  # noqa: F401
import torch
from sglang.srt.models.glm4_moe import Glm4MoeGate
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteGate


def _logits(gate: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """Logits [T, experts] in float32 from hidden states [T, H], of the weight as it is now."""
    weight = gate.weight
    assert isinstance(weight, torch.Tensor)
    return torch.nn.functional.linear(hidden_states.float(), weight.float())


for _gate in (Glm4MoeGate, Glm4MoeLiteGate):
    _gate.forward = _logits
