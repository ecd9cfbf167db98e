"""A reward over all samples of a prompt: the right answer counts, and so does one that no other sample gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from millrace import RewardInput


def rarity(samples: Sequence[RewardInput], *, right: float = 1.0, new: float = 0.2) -> list[dict[str, float]]:
    """`right` for the right answer, and `new` shared by all samples of the prompt that say the same."""
    copies = Counter(sample.response for sample in samples)
    found = [float(sample.response == sample.label) for sample in samples]
    alone = [1 / copies[sample.response] for sample in samples]
    return [
        {"reward": right * f + new * a, "right": f, "alone": a} for f, a in zip(found, alone, strict=True)
    ]
