"""How long an optimizer step waits for the host, if AdamW steps a part of the parameters there. Pure.

The rates are of a usual host with PCIe 5 and DDR5, and assumed. `python -m benchmarks.gpu.trainer --shape 1.7b --offload 0,1`
measures the step on this one.
"""

import os
from dataclasses import dataclass

from millrace.core.config.model_preset import GPUS_A_HOST
from millrace.core.config.plan.memory import FP32, stepped_on_host
from millrace.core.config.run_config import RunConfig
from millrace.core.families.architecture import Architecture

PCIE = 50e9  # bytes a second, each way, of one GPU on PCIe 5 with 16 lanes
CORE = 8e9  # bytes a second that one core moves through the host's memory
HOST = 300e9  # that all cores of a host move
# bytes of a parameter through the host's memory: AdamW reads its gradient, weight and moments, and writes the last three; the
# gradient was written before, and the weight is read afterwards, to be written in the model's type
MOVED = 9 * FP32


@dataclass(frozen=True)
class HostStep:
    """A step's part on the host, of the fullest rank. Bytes and seconds."""

    gradients: int
    weights: int
    copies_s: float
    adamw_s: float

    @property
    def waits_s(self) -> float:
        """How much longer a step takes: copies and AdamW go on at once."""
        return max(self.copies_s, self.adamw_s)


def host_step(config: RunConfig, shape: Architecture, cores: int | None = None) -> HostStep | None:
    """None without trainer.optimizer.offload. cores: of a host; this one's when not given."""
    elements = stepped_on_host(config, shape)
    if not elements:
        return None
    t = config.trainer
    width = 2 if config.dtype == "bfloat16" else FP32
    ranks = min(t.world_size, GPUS_A_HOST)
    threads = (t.threads or max(1, (cores or os.cpu_count() or 1) // ranks)) * ranks
    moved = ranks * elements * (MOVED + width)
    return HostStep(
        gradients=elements * FP32,
        weights=elements * width,
        copies_s=elements * FP32 / PCIE,
        adamw_s=moved / min(threads * CORE, HOST),
    )
