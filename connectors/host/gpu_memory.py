"""How much memory this host's GPUs have, without loading torch."""

import subprocess

ASK = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
PATIENCE_S = 10.0
MIB = 2**20


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU, as nvidia-smi says; None if it says nothing, as on a host without a GPU."""
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) for line in done.stdout.splitlines() if line.strip().isdecimal()]
    return min(sizes) * MIB if sizes else None
