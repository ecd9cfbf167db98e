"""GRPO from top to bottom in plain PyTorch: what a millrace run computes, without a cluster, files or packing.

    python examples/plain_rl.py      # about a minute on one CPU core: held-out accuracy 0.421 -> 0.505

For whoever wants to read the algorithm, or to try a change to it before wiring it into a run. One process holds everything:
sample, reward, advantage, loss, step. The tests hold the production path equal to the functions below
(tests/connectors/megatron/test_parity.py), so this file is also the specification.

Shape suffixes: P prompts of an iteration, G samples of a prompt, B = P * G samples, T tokens of a sample (prompt and
response), R response tokens, V vocabulary. `logprobs_BR` is the log-probability of each response token of each sample.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

VOCAB = "0123456789+=."  # "." ends a response
P, G, R = 64, 8, 4
WARM_UP_STEPS, ITERATIONS, STEPS_PER_ITERATION = 160, 40, 2
LR, CLIP_RANGE, CLIP_GRAD = 5e-4, 0.2, 1.0


def main() -> None:
    torch.manual_seed(0)
    model = tiny_model()
    sums = [(a, b) for a in range(50) for b in range(50)]
    random.Random(0).shuffle(sums)
    held_out, training = sums[:200], sums[200:]
    warm_up(model, training)
    before = accuracy(model, held_out)

    optimizer = adamw(list(model.parameters()), LR)
    for iteration in range(ITERATIONS):
        problems = random.Random(iteration).sample(training, P)
        prompts_BT = encode([prompt(a, b) for a, b in problems for _ in range(G)])

        # sample: the model continues each prompt G times
        tokens_BT, mask_BR, sampled_BR = sample(model, prompts_BT)

        # reward: 1 for the right answer
        answers = [str(a + b) for a, b in problems for _ in range(G)]
        rewards_B = torch.tensor([reward(*pair) for pair in zip(decode(tokens_BT), answers, strict=True)])

        # advantage: how much better than the other samples of the same prompt
        advantages_B = group_advantages(rewards_B.view(P, G)).flatten()

        # loss and step: several optimizer steps on one iteration's samples, each on whole groups
        for part in torch.arange(P * G).chunk(STEPS_PER_ITERATION):
            logprobs_BR = response_logprobs(model, tokens_BT[part], R)
            loss = grpo_loss(logprobs_BR, sampled_BR[part], advantages_B[part], mask_BR[part])
            clipped_step(loss, optimizer, CLIP_GRAD)
        if (iteration + 1) % 5 == 0:
            print(
                f"iteration {iteration + 1} of {ITERATIONS}: mean reward {rewards_B.mean():.3f}", flush=True
            )
    print(f"held-out accuracy {before:.3f} -> {accuracy(model, held_out):.3f}")


# the algorithm


@torch.no_grad()
def sample(model: Any, prompts_BT: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Continue each prompt by R tokens: all tokens, the mask [B, R] of those up to the end, and their log-probabilities."""
    tokens_BT = prompts_BT
    logprobs: list[Tensor] = []
    for _ in range(R):
        logprobs_BV = (model(tokens_BT).logits[:, -1] / temperature).log_softmax(-1)
        next_B = torch.multinomial(logprobs_BV.exp(), 1)
        logprobs.append(logprobs_BV.gather(1, next_B))
        tokens_BT = torch.cat([tokens_BT, next_B], 1)
    ended_BR = (tokens_BT[:, -R:] == VOCAB.index(".")).long()
    mask_BR = (
        ended_BR.cumsum(1) - ended_BR == 0
    ).float()  # the end itself is trained on, what follows is not
    return tokens_BT, mask_BR, torch.cat(logprobs, 1)


def reward(text: str, answer: str) -> float:
    """1 if the response is the answer, else 0."""
    return float(text.partition("=")[2].partition(".")[0] == answer)


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """(R - mean of its group) / (std of its group + 1e-6) [P, G]; equal rewards teach nothing. GRPO, arXiv:2402.03300."""
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    varied_P1 = rewards_PG.amax(1, keepdim=True) > rewards_PG.amin(1, keepdim=True)
    return torch.where(varied_P1, centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-6), 0.0)


def response_logprobs(model: Any, tokens_BT: Tensor, length: int, temperature: float = 1.0) -> Tensor:
    """Log-probability of each of the last `length` tokens, given those before it."""
    logprobs_BTV = (model(tokens_BT).logits / temperature).log_softmax(-1)
    chosen_BT = logprobs_BTV[:, :-1].gather(2, tokens_BT[:, 1:, None])[..., 0]
    return chosen_BT[:, -length:]


def grpo_loss(
    logprobs_BR: Tensor,
    old_logprobs_BR: Tensor,
    advantages_B: Tensor,
    mask_BR: Tensor,
    *,
    ref_logprobs_BR: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Clipped policy loss (PPO, arXiv:1707.06347), and the k3 estimate of the KL against a reference: mean over each
    sample's tokens, then over samples."""
    ratio_BR = (logprobs_BR - old_logprobs_BR).exp()
    advantages_B1 = advantages_B[:, None]
    clipped_BR = ratio_BR.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    loss_BR = -torch.minimum(ratio_BR * advantages_B1, clipped_BR * advantages_B1)
    if ref_logprobs_BR is not None:
        gap_BR = ref_logprobs_BR - logprobs_BR
        loss_BR = loss_BR + kl_coef * (gap_BR.exp() - gap_BR - 1)
    return ((loss_BR * mask_BR).sum(1) / mask_BR.sum(1)).mean()


def adamw(parameters: list[Tensor], lr: float, weight_decay: float = 0.01) -> torch.optim.AdamW:
    """AdamW with the trainer's constants; vectors (norms, biases) do not decay."""
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), eps=1e-8)


def clipped_step(loss: Tensor, optimizer: torch.optim.Optimizer, clip_grad: float) -> float:
    """One optimizer step with the gradient's norm bounded; returns the norm before."""
    optimizer.zero_grad()
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
    optimizer.step()
    return float(norm)


# the sums and the model


def prompt(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def encode(texts: list[str]) -> Tensor:
    return torch.tensor([[VOCAB.index(character) for character in text] for text in texts])


def decode(tokens_BT: Tensor) -> list[str]:
    return ["".join(VOCAB[number] for number in row) for row in tokens_BT.tolist()]


def tiny_model() -> Any:
    """The quickstart's Qwen3, with a vocabulary of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCAB),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
        )
    )


def warm_up(model: Any, sums: list[tuple[int, int]]) -> None:
    """Learn from answers until some samples are right: where no reward is ever seen, there is nothing to reinforce."""
    optimizer = adamw(list(model.parameters()), 2e-3)
    for step in range(WARM_UP_STEPS):
        batch = random.Random(step).sample(sums, 128)
        tokens_BT = encode([f"{prompt(a, b)}{a + b}.".ljust(6 + R, ".") for a, b in batch])
        clipped_step(-response_logprobs(model, tokens_BT, R).mean(), optimizer, CLIP_GRAD)


def accuracy(model: Any, sums: list[tuple[int, int]]) -> float:
    """Share of right answers, four samples each, as in training."""
    repeated = [problem for problem in sums for _ in range(4)]
    tokens_BT, _, _ = sample(model, encode([prompt(a, b) for a, b in repeated]))
    texts = decode(tokens_BT)
    return sum(reward(text, str(a + b)) for text, (a, b) in zip(texts, repeated, strict=True)) / len(texts)


if __name__ == "__main__":
    main()
