"""The losses of the routers of a mixture of experts, as trainer.megatron sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MoELosses:
    """Coefficients; 0 turns a loss off."""

    kind: str = "aux_loss"  # moe_router_load_balancing_type
    aux_coeff: float = 0.0
    z_coeff: float = 0.0

    @property
    def wanted(self) -> bool:
        """Whether any loss is on."""
        return self.aux_coeff > 0 or self.z_coeff > 0


FIELDS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def moe_losses(options: Mapping[str, Any]) -> MoELosses:
    """The losses that options of trainer.megatron name."""
    kind, aux, z = (options.get(name) for name in FIELDS)
    return MoELosses(kind or "aux_loss", float(aux or 0), float(z or 0))
