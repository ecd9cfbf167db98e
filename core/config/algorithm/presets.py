"""What each algorithm preset sets, as differences from the defaults of the `algorithm` section (which are GRPO's).

Owns the values; knows nothing of how they are used. No torch. docs/algorithms.md has the formulas.
"""

from typing import Any, Literal

Preset = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "max_rl",
    "opd",
]

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv:2402.03300, eqs. 3-4; the paper's KL term is kl_coef 0.04, off here
    "grpo": {},
    # arXiv:2503.20783: no division by the group's standard deviation or the response's length
    "dr_grpo": {"advantage": {"divide_by_std": False}, "aggregation": "constant"},
    # arXiv:2503.14476, eqs. 8-13: clip-higher, token mean, overlong shaping; its dynamic sampling is filter.drop_zero_variance
    "dapo": {"loss": {"clip_high": 0.28}, "aggregation": "token_mean", "overlong": {}},
    # arXiv:2507.18071, eqs. 5-7, with the clip range of its section 5
    "gspo": {"loss": "gspo"},
    # MiniMax-M1, arXiv:2506.13585, eqs. 4-5
    "cispo": {"loss": "cispo", "aggregation": "token_mean"},
    # arXiv:2402.14740: leave-one-out baseline, the whole response one action
    "rloo": {
        "advantage": "leave_one_out",
        "loss": "reinforce",
        "aggregation": "constant",
        "constant_length": 1,
    },
    # arXiv:1707.06347 with GAE (arXiv:1506.02438) and the KL penalty in the reward (arXiv:2203.02155)
    "ppo": {
        "advantage": "gae",
        "aggregation": "token_mean",
        "whiten": True,
        "kl_placement": "reward",
        "kl_kind": "k1",
    },
    # arXiv:2501.03262: discounted return of reward and KL penalty, whitened over the batch
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "aggregation": "token_mean",
        "whiten": True,
        "kl_placement": "reward",
        "kl_kind": "k1",
        "kl_coef": 0.001,
    },
    # arXiv:2501.03262: the group's mean as baseline, whitened over the batch, KL in the loss
    "reinforce_plus_plus_baseline": {
        "advantage": "reinforce_plus_plus_baseline",
        "aggregation": "token_mean",
        "whiten": True,
        "kl_kind": "k2",
        "kl_coef": 0.001,
    },
    # MaxRL, arXiv:2602.02710
    "max_rl": {"advantage": "max_rl"},
    # on-policy distillation: no reward, the teacher's log-probabilities alone
    "opd": {
        "advantage": "none",
        "loss": "clipped",
        "aggregation": "token_mean",
        "distillation_coef": 1.0,
    },
}
