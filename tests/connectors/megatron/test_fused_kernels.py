"""The trainer's GPU kernels against their definitions in float64, in Triton's interpreter: no GPU, but Triton, needed.

tests/gpu runs the same kernels compiled. A process of its own: Triton reads TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[2] / "support" / "kernel_checks.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compute_their_definitions_and_gradients() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS), "cpu"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
