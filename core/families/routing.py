"""A router of sigmoids: how DeepSeek-V3 and models after it choose a token's experts (arXiv:2412.19437, section 2.1.2).

Each expert has a score of its own, between 0 and 1. A bias, which no step of RL changes, moves the choice only; the scores
without it weigh the chosen experts. No torch: scores are whatever tensor the caller has.
"""

import math
from dataclasses import dataclass
from typing import Any

BEST = 2  # experts of a group whose scores, summed, are the group's; Hugging Face's, DeepSeek's and SGLang's number
SMALLEST = 1e-20  # added to a sum that divides, as Hugging Face does


@dataclass(frozen=True)
class SigmoidRouting:
    """Scores are those of sigmoids, and only experts of the `groups_used` best of `groups` groups can be chosen."""

    groups: int
    groups_used: int
    factor: float  # of the weights

    def chosen(self, logits: Any, bias: Any, count: int) -> Any:
        """Numbers of the experts [T, count] that tokens use, from logits [T, E] and the bias [E]."""
        choice = logits.detach().sigmoid() + bias
        if self.groups > 1:
            by_group = choice.unflatten(-1, (self.groups, -1))
            of_groups = by_group.topk(BEST, dim=-1).values.sum(-1)
            used = of_groups.topk(self.groups_used, dim=-1).indices
            unused = of_groups.new_ones(of_groups.shape).scatter(-1, used, 0.0).bool()
            choice = by_group.masked_fill(unused.unsqueeze(-1), -math.inf).flatten(-2)
        return choice.topk(count, dim=-1).indices

    def weights(self, logits: Any, chosen: Any, *, normalised: bool) -> Any:
        """Weights of the chosen experts, both [T, count]. normalised: they sum to `factor`."""
        scores = logits.sigmoid().gather(-1, chosen)
        if normalised:
            scores = scores / (scores.sum(-1, keepdim=True) + SMALLEST)
        return scores * self.factor
