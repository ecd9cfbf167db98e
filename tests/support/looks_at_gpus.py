"""A class whose module notes at its import which GPUs its process may see, as CUDA does at its first use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")


class LooksAtGpus:
    """Tells what its module saw."""

    def __init__(self, config: Mapping[str, Any], index: int, count: int) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"at_import": AT_IMPORT}
