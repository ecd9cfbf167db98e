"""Figures of tokens by their age: how far engine and trainer are apart at the same weights, and how far weights moved since.

Two ratios are kept apart. At age 0 the trainer holds the weights that made the token, so that proximal / behaviour is the
engine's mismatch alone. Above 0 it is the staleness of the token, times that mismatch, which cannot be measured there. Owns both
and the shares of ages; knows nothing of losses. Nothing here carries a gradient. All figures are (sum, weight) pairs over
unmasked tokens, exact under any split of the batch.
"""

import torch
from torch import Tensor

from millrace.core.algorithms.aggregate import clean, upcast
from millrace.core.algorithms.kl import kl_estimate

LAST_AGE = 4  # tokens of this age or more have their figures in common
LOG_RATIO_BOUND = 20.0

Figures = dict[str, tuple[Tensor, Tensor]]


def age_metrics(ages: Tensor, mask: Tensor) -> Figures:
    """Mean age, and the share of tokens of age 0, on which engine and trainer must agree.

    ages, mask [N]; ages as of millrace.core.accounts.staleness.token_ages.
    """
    on = mask.bool()
    count = on.sum().float()
    return {
        "staleness_mean": (clean(upcast(ages), on).sum(), count),
        "logprob_gap_share": (((ages == 0) & on).sum().float(), count),
    }


def ratio_metrics(proximal: Tensor, behaviour: Tensor, mask: Tensor, ages: Tensor, oldest: int) -> Figures:
    """Both ratios, and by age the share of tokens and their mean difference; nothing of ages above `oldest`.

    proximal, behaviour [N]: log-probabilities of the trainer before the iteration, and of the engine when it made the
    token. mismatch_ratio, mismatch_kl: mean proximal / behaviour and KL (k3) of behaviour from proximal, over tokens of age
    0. staleness_ratio, behaviour_kl: the same over older tokens. share_age_k, logprob_gap_age_k: share of tokens, and mean
       |proximal - behaviour|; the last k,
    LAST_AGE, stands for all from it on. A mean over no token is 0 / 0; `measured` takes it out.
    """
    on = mask.bool()
    count = on.sum().float()
    ours, theirs = (clean(upcast(x).detach(), on) for x in (proximal, behaviour))
    ratio = (ours - theirs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    kl = kl_estimate(theirs, ours, "k3", mask=on)  # the engine drew the tokens
    gap = (ours - theirs).abs()
    same, older = on & (ages == 0), on & (ages > 0)
    found = {
        "mismatch_ratio": _mean(ratio, same),
        "mismatch_kl": _mean(kl, same),
        "staleness_ratio": _mean(ratio, older),
        "behaviour_kl": _mean(kl, older),
    }
    for age in range(min(oldest, LAST_AGE) + 1):
        these = on & (ages >= age if age == LAST_AGE else ages == age)
        found[f"share_age_{age}"] = (these.sum().float(), count)
        found[f"logprob_gap_age_{age}"] = _mean(gap, these)
    return found


def measured(means: dict[str, float]) -> dict[str, float]:
    """The means of a step, without those over tokens of ages that the step does not have."""
    none = {
        name.replace("share_", "logprob_gap_")
        for name, share in means.items()
        if name.startswith("share_age_") and share == 0
    }
    if "share_age_0" in means:
        if means["share_age_0"] == 0:
            none |= {"mismatch_ratio", "mismatch_kl"}
        if means["share_age_0"] == 1:
            none |= {"staleness_ratio", "behaviour_kl"}
    return {name: value for name, value in means.items() if name not in none}


def _mean(x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(which, x, torch.zeros_like(x)).sum(), which.sum().float()
