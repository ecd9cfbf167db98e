"""A trace of what this process computes, for Perfetto or chrome://tracing, by PyTorch's profiler."""

from pathlib import Path
from typing import Any

SUFFIX = ".trace.json.gz"  # as SGLang's


class TorchTrace:
    """Records the thread that starts it, and all kernels of this process's GPU. At most one at a time in a process."""

    def __init__(self, *, gpu: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler: Any = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        )
        self._profiler.start()

    def stop(self, folder: str, name: str) -> None:
        """End it, and write it to a file of this name. Called by the same thread."""
        self._profiler.stop()
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(Path(folder) / f"{name}{SUFFIX}"))
