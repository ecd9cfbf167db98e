"""The reward of DeepScaleR: only what follows the reasoning counts, and of that the last box. Pure."""

from __future__ import annotations

from millrace.core.hooks import RewardInput
from millrace.core.rewards.math import equal, last_boxed

MARKERS = ("</think>", "###Response")  # the first that occurs decides


def deepscaler(sample: RewardInput, *, symbolic: bool = True) -> float:
    """1 if the last \\boxed{...} after the reasoning is the label, else 0.

    The reasoning ends at the last </think>, or else at the last ###Response; a response with neither scores 0, and so does
    every response to an empty label. The label may be boxed.
    """
    marker = next((marker for marker in MARKERS if marker in sample.response), None)
    if marker is None or sample.label is None:
        return 0.0
    answer = last_boxed(sample.response.rpartition(marker)[2])
    boxed = last_boxed(str(sample.label))
    label = str(sample.label).strip() if boxed is None else boxed
    return float(bool(answer and label) and equal(answer or "", label, symbolic=symbolic))
