"""The `sync` section: one variant a transport, each with only the fields that act there."""

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.menu import Menu
from millrace.core.config.parts.section import Section


class _Transport(Section):
    directory: str | None = Field(
        None,
        description="Folder for weight files, under the same path for trainer and engines; or a URL such as "
        "s3://bucket/weights, to and from which each node copies them (not for engines.kind=external). When not given: "
        "shared memory of this host, which other nodes do not see.",
    )
    lora: Literal["merged", "names"] = Field(
        "merged",
        description="How engines get the adapters of trainer.lora. merged: added to the weights, which travel whole. names: as a folder "
        "that engines serve beside the weights; each version has its own name, a request keeps the name that it started with, and no "
        "engine pauses.",
    )
    max_logprob_gap: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="Largest mean difference between engine and trainer log-probabilities on a step's tokens "
        "that the current weights generated; above it the run stops before the iteration's first update. `auto`: three times what "
        "rounding makes of the model, which the trainer measures at the run's first step by computing some samples one type "
        "wider. Nats a token.",
    )
    max_prompt_gap: float | None = Field(
        None,
        gt=0,
        description="Largest mean difference between an engine's and the trainer's log-probabilities of four fixed texts, compared after each sync. Above it the run stops before anything is generated. Checksums of the engines' weights are "
        "recorded too. null: nothing is compared. Nats a token.",
    )

    @property
    def by_url(self) -> bool:
        """Whether files are copied to and from `directory`, not read and written in place."""
        return "://" in (self.directory or "")


class _Buckets(_Transport):
    bucket_mib: int = Field(
        512,
        ge=1,
        description="Size of a bucket: the extra memory that ipc and broadcast take on every trainer rank, unless a tensor is larger. MiB.",
    )


class AutoSync(_Buckets):
    """The fastest transport that fits: ipc on shared GPUs, broadcast to SGLang engines elsewhere, else disk."""

    kind: Literal["auto"] = "auto"


class DiskSync(_Transport):
    """The trainer writes a Hugging Face folder and the engines load it."""

    kind: Literal["disk"] = "disk"


class IpcSync(_Buckets):
    """SGLang engines on the trainer's GPUs map one bucket of weights at a time. Needs placement.colocate."""

    kind: Literal["ipc"] = "ipc"


class BroadcastSync(_Buckets):
    """Trainer rank 0 sends buckets to engines elsewhere: by NCCL, or by gloo to embedded engines."""

    kind: Literal["broadcast"] = "broadcast"


Sync = Annotated[
    AutoSync | DiskSync | IpcSync | BroadcastSync,
    Field(discriminator="kind"),
    Menu(
        """How new weights reach the engines.

        - `auto` — ipc if trainer and engines share GPUs, broadcast for engines.kind=sglang on separate GPUs, else disk.
        - `disk` — a Hugging Face folder, or a URL. Works everywhere; the slowest.
        - `ipc` — GPU memory, one bucket at a time. Needs `placement.colocate`.
        - `broadcast` — buckets from trainer rank 0, by NCCL, or by gloo to embedded engines. Needs engines on other GPUs.
        """,
        default="auto",
    ),
]
