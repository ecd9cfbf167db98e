"""The payload of /update_weights_from_tensor: a pickled flat tensor of one GPU and its metadata, in base64.

Owns SGLang's format without importing SGLang: its unpickler allows classes of torch and types, and it reads the metadata by
attribute. Knows nothing of the weights' origin.
"""

import base64
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from millrace.core.contracts.weight_bucket import TensorEntry


class _Shared:
    """A tensor of another process, rebuilt by torch when it is unpickled."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        return rebuild_cuda_tensor, self.arguments


def payload(entries: Sequence[TensorEntry], handle: bytes) -> str:
    """One GPU's payload of a bucket. `handle`: pickled arguments of torch's rebuild_cuda_tensor, device by uuid."""
    import torch

    flat = _Shared(pickle.loads(handle))  # noqa: S301 - made by the run's own trainer
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=getattr(torch, entry.dtype),
            start_idx=entry.start,
            end_idx=entry.end,
            numel=entry.end - entry.start,
        )
        for entry in entries
    ]
    body = pickle.dumps({"flattened_tensor": flat, "metadata": metadata})
    return base64.b64encode(body).decode("ascii")
