"""What a loss is given: the response tokens of one pack, with the log-probabilities of everyone who scored them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class TokenBatch:
    """Response tokens of the B samples of one pack, end to end in one dimension N; samples are whole."""

    logprobs: Tensor  # [N] trainer's log-probs at sampling temperature; carries the gradient
    old_logprobs: Tensor  # [N] the policy that the ratio is taken against
    rollout_logprobs: Tensor  # [N] the engine's
    ref_logprobs: Tensor | None  # [N] reference model's
    advantages: Tensor  # [N]
    mask: Tensor  # [N] 1: in the loss
    lengths: Tensor  # [B] response lengths, sum = N
    weights: Tensor  # [N] see millrace.core.algorithms.aggregate; loss = sum of weights * token loss
    entropy: Tensor | None = None  # [N] nats; carries the gradient when an entropy bonus is set
    # [N, k] the trainer's, of the teacher's likeliest tokens; carries the gradient
    top_logprobs: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None  # [N, k] the teacher's
    # [N] published versions between a token's and the iteration's; None: all are of the latter
    ages: Tensor | None = None
