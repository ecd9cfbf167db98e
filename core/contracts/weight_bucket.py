"""A bucket of weights: whole tensors laid end to end in one flat buffer, as a trainer rank fills it and an engine takes it.

The one description of it. Imports no torch: the process that drives the ranks need not load it.
"""

from dataclasses import dataclass
from typing import NamedTuple


class TensorEntry(NamedTuple):
    """The place of one tensor in the buffer."""

    name: str  # its Hugging Face name
    shape: tuple[int, ...]
    dtype: str  # as torch names it, without the prefix: "bfloat16"
    start: int  # first byte
    end: int  # first byte after it


@dataclass(frozen=True)
class WeightBucket:
    """Metadata of one bucket, as a rank reports it; the bytes stay in the rank's memory until the next bucket."""

    entries: list[TensorEntry]
    size: int  # bytes
    last: bool  # whether it is the last bucket of a pass over all weights
    handle: bytes  # how another process on this GPU opens the buffer; empty if it was not asked for
