"""Token F1 of SQuAD (arXiv:1606.05250): how many words answer and label share. Pure."""

import re
import string
from collections import Counter

from millrace.core.hooks.protocols import RewardInput, RewardResult

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WHOLE = {"yes", "no", "noanswer"}  # must be the whole answer, or count as no match


def f1(sample: RewardInput) -> RewardResult:
    """F1 of the response's words against the label's, the best of them if the label is a list; parts precision and recall.

    Case, punctuation and articles do not count. Without a label the reward is 0.
    """
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    answer = _words(sample.response)
    found = [_compared(answer, _words(str(label))) for label in labels if label is not None]
    best = max(found, default=(0.0, 0.0, 0.0))
    return RewardResult(best[0], {"precision": best[1], "recall": best[2]})


def _compared(answer: list[str], label: list[str]) -> tuple[float, float, float]:
    """F1, precision and recall."""
    if answer != label and WHOLE & {" ".join(answer), " ".join(label)}:
        return 0.0, 0.0, 0.0
    same = sum((Counter(answer) & Counter(label)).values())
    if not same:
        return 0.0, 0.0, 0.0
    precision, recall = same / len(answer), same / len(label)
    return 2 * precision * recall / (precision + recall), precision, recall


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()
