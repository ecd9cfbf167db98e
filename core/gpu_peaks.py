"""What GPUs can compute at most, for a model's share of it (MFU).

Dense products in bfloat16 with sums in float32, as the vendor states them; without sparsity.
"""

import re
from collections.abc import Sequence

TERA = 1e12
# words of a GPU's name, and its peak in 10^12 operations a second. The first row whose words are all in the name holds
PEAKS: Sequence[tuple[tuple[str, ...], float]] = (
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H200", "NVL"), 835.0),
    (("H100",), 989.0),
    (("H200",), 989.0),
    (("H800",), 989.0),
    (("GH200",), 989.0),
    (("H20",), 148.0),
    (("B200",), 2250.0),
    (("GB200",), 2500.0),
    (("A100",), 312.0),
    (("A800",), 312.0),
    (("L40S",), 362.0),
    (("L4",), 121.0),
    (("A10",), 125.0),
    (("A30",), 165.0),
    (("A40",), 149.7),
)


def peak_of(name: str) -> float | None:
    """Operations a second of a GPU by the name that its driver gives it; None if it is not listed, or is a slice of a GPU."""
    words = re.split(r"[ -]", name)
    if "MIG" in words:
        return None
    return next((peak * TERA for marks, peak in PEAKS if all(mark in words for mark in marks)), None)
