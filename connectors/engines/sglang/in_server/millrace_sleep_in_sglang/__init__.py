"""Makes an engine finish its work on the GPU before it gives memory away. SGLang's process loads it.

SGLang 0.5.17 starts copies of the model's buffers and takes their memory away at once. On a GPU that another process uses too, a copy may
come after that, and ends the engine: "an illegal memory access was encountered". Imports nothing of millrace.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.utils import torch_memory_saver_adapter

_Adapter = torch_memory_saver_adapter._TorchMemorySaverAdapterReal
_pause_at_once = _Adapter.pause


def _pause(adapter: object, tag: str) -> None:
    """Take the memory of a tag away once nothing uses it any more."""
    torch.get_device_module().synchronize()
    _pause_at_once(adapter, tag)


_Adapter.pause = _pause

# SGLang loads one package with models: the user's own is loaded from here
if _own := os.environ.get("MILLRACE_EXTERNAL_MODEL_PACKAGE"):
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.register(_own, overwrite=True)
