"""The `placement` section."""

from __future__ import annotations

from pydantic import Field

from millrace.core.config.parts.section import Section


class Placement(Section):
    """Where ranks and engines run."""

    colocate: bool = Field(
        False,
        description="Trainer and engines share GPUs and release memory in turn: engines their weights and KV cache while the trainer steps, the trainer its optimizer state and gradients while they take new weights and generate.",
    )
    offload_engines: bool = Field(
        True,
        description="On shared GPUs, whether engines release their memory while the trainer steps. Without it they keep engines.sglang.mem_fraction_static of the GPU, and the trainer has what is left.",
    )
    offload_trainer: bool = Field(
        True,
        description="On shared GPUs, whether the trainer's optimizer state goes to host memory while engines take new weights and generate. Where GPU memory suffices for both, keeping it there saves that way.",
    )
    ray_address: str | None = Field(
        None, description="Ray cluster to join; a local one is started when not given."
    )
    wait_s: float = Field(
        120,
        ge=0,
        description="Longest wait for the cluster to have room for the run, also after a node died. Seconds.",
    )
