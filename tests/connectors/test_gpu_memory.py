"""What nvidia-smi says of this host's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.connectors.host.gpu_memory import MIB, gpu_memory


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("echo 81559; echo 143771", 81559 * MIB),
        ("echo '[N/A]'", None),
        ("echo no driver; exit 9", None),
        (None, None),
    ],
)
def test_the_smallest_gpu_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, found: int | None
) -> None:
    if program is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program else str(tmp_path))
    assert gpu_memory() == found
