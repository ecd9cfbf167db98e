"""The reward of DAPO (arXiv:2503.14476): 1 for a right answer, -1 for every other. Pure.

Answers are compared as text and as numbers; algebra is not used.
"""

import re

from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.math import judged, last_boxed
from millrace.core.rewards.text import label_text

ANSWER = re.compile(r"answer[ \t]*:[ \t]*([^\n]+)", re.IGNORECASE)
READ, READ_STRICTLY = 300, 100  # last characters that are read


def dapo(sample: RewardInput, *, strict_box: bool = False) -> RewardResult:
    """1 if the last `Answer: ...` among the last 300 characters is the label, else -1; part `acc` is 1 or 0.

    strict_box: the last \\boxed{...} among the last 100 characters counts instead, and must be the label to the letter.
    """
    label = label_text(sample.label).strip()
    if strict_box:
        answer = last_boxed(sample.response[-READ_STRICTLY:]) or ""
        right = bool(label) and answer == label
    else:
        found = ANSWER.findall(sample.response[-READ:])
        answer = found[-1].rpartition("=")[2].strip().strip("$").rstrip(".").strip() if found else ""
        judgement = judged(answer, label, symbolic=False)
        right, answer = bool(judgement.reward), judgement.answer or ""
    return RewardResult(1.0 if right else -1.0, {"acc": float(right)}, answer)
