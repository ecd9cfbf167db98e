"""The reward of DeepScaleR: only the last box after the reasoning counts. Pure."""

from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.math import boxed_answer, judged, last_boxed
from millrace.core.rewards.text import label_text

MARKERS = ("</think>", "###Response")  # the first that occurs ends the reasoning


def deepscaler(sample: RewardInput, *, symbolic: bool = True) -> RewardResult:
    """1 if the last \\boxed{...} after the reasoning is the label, else 0.

    The reasoning ends at the last </think>, or else at the last ###Response; a response with neither scores 0, and so does
    every response to an empty label. The label may be boxed.
    """
    text = label_text(sample.label)
    boxed = last_boxed(text)
    label = text.strip() if boxed is None else boxed
    marker = next((marker for marker in MARKERS if marker in sample.response), None)
    if marker is None or not label:
        return RewardResult(0.0, answer="")
    return judged(boxed_answer(sample.response.rpartition(marker)[2]), label, symbolic=symbolic)
