"""The `placement` section."""

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.from_preset import EMPTY_IN_FORMS, FROM_PRESET
from millrace.core.config.parts.section import Section


def is_clients(address: str | None) -> bool:
    """True for ray:// addresses: this process is a client of the cluster, not a node."""
    return (address or "").startswith("ray://")


class Placement(Section):
    """Where ranks and engines run."""

    model_config = EMPTY_IN_FORMS

    colocate: Annotated[bool, FROM_PRESET] = Field(
        False,
        description="Trainer and engines share GPUs and release memory in turn: engines release weights and KV cache while the trainer steps, the trainer offloads optimizer state and gradients while engines load weights and generate.",
    )
    offload_engines: bool = Field(
        True,
        description="On shared GPUs, whether engines release their memory while the trainer steps. If not, they keep engines.sglang.mem_fraction_static of the GPU, and the trainer has the rest.",
    )
    offload_trainer: bool = Field(
        True,
        description="On shared GPUs, whether the trainer's optimizer state goes to host memory while engines load weights and generate. If GPU memory suffices for both, false saves the transfer.",
    )
    kernel_cache: str | None = Field(
        None,
        description="Folder or URL such as s3://bucket/kernels, from which hosts take compiled kernels before engines (`sglang`) and ranks with a GPU "
        "start, and to which they give what they compiled. Each kind of host has its own folder there. When not given, each host compiles. "
        "[What is kept](gpus.md#compiled-kernels).",
    )
    ray_address: str | None = Field(
        None,
        description="Ray cluster to join, as host:port. `ray://host:port` joins by Ray's client server, from a host outside the cluster. When not given, a local cluster is started.",
    )
    task_runner: Literal["auto", "ray", "local"] = Field(
        "auto",
        description="Where rollout, reward and evaluations work. `local`: in the process that drives the run. `ray`: in shards, each a task on "
        "a node of the Ray cluster (rollout.shards). `auto`: `ray` if placement.ray_address is set, every node reaches the Prefect server and shards can do all that the run needs; else `local`.",
    )
    tensor_over_hosts: Annotated[bool, FROM_PRESET] = Field(
        False,
        description="Whether the ranks of a tensor parallel group, of the trainer or of an engine (engines.nodes), may be on several hosts, where every layer waits for the network. If not, a group that no host has GPUs for is refused.",
    )
    wait_s: float = Field(
        120,
        ge=0,
        description="Longest wait for the cluster to have room for the run, also after a node died. Seconds.",
    )
