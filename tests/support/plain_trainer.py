"""Steps of any algorithm in plain PyTorch, one sequence at a time: Hugging Face models, torch AdamW, torch clipping.

What is GRPO's own stands in examples/plain_rl.py; what the other algorithms need is beside it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.plain_rl import adamw, clipped_step, response_logprobs
from millrace.core.algorithms.aggregate import sample_weights, spread
from millrace.core.algorithms.credit import SampleCredit, ScoredSamples, sample_credit, token_credit
from millrace.core.algorithms.kl import KLController
from millrace.core.algorithms.losses import value_loss
from millrace.core.algorithms.objective import Objective
from millrace.core.config.algorithm import Algorithm
from millrace.core.contracts.token_batch import TokenBatch

LR, CLIP_GRAD = 1e-3, 0.5


class Plain:
    """A policy, its reference and its optimizer; nothing packed, nothing cut."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = adamw(list(self.model.parameters()), LR)

    def logprobs(self, row: dict[str, Any], model: Any = None, temperature: float = 1.0) -> Tensor:
        tokens_1T = torch.tensor([row["tokens"]])
        return response_logprobs(model or self.model, tokens_1T, row["response_length"], temperature)[0]

    def step(self, loss: Tensor) -> float:
        return clipped_step(loss, self.optimizer, CLIP_GRAD)


class PlainCritic:
    """Values of response tokens: the model's body and a scalar head that starts at zero."""

    def __init__(self, folder: Path, lr: float) -> None:
        import transformers

        self.body = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = adamw([*self.body.parameters(), *self.head.parameters()], lr)

    def values(self, rows: list[dict[str, Any]]) -> Tensor:
        found = []
        for row in rows:
            hidden = self.body(torch.tensor(row["tokens"])[None]).last_hidden_state[0]
            found.append(self.head(hidden)[:-1, 0][-row["response_length"] :])
        return torch.cat(found)


class PlainLearner(Plain):
    """Steps of any algorithm, by the pure functions of millrace.core.algorithms on one sequence after another."""

    def __init__(self, folder: Path, config: Algorithm) -> None:
        import transformers

        super().__init__(folder)
        self.config = config
        self.objective = Objective(config)
        self.controller = KLController(config)
        if config.reference:
            self.reference = transformers.AutoModelForCausalLM.from_pretrained(
                config.reference, dtype=torch.float32
            )
        body = Path(config.critic.path) if config.critic and config.critic.path else folder
        self.critic = PlainCritic(body, config.critic.lr) if config.critic else None
        self.teacher = (
            transformers.AutoModelForCausalLM.from_pretrained(config.teacher, dtype=torch.float32)
            if config.teacher
            else None
        )
        self.critic_rates: dict[int, float] = {}  # by step, where the schedule is not constant
        self.old: dict[str, Tensor] = {}
        self.old_values: dict[str, Tensor] = {}
        self.whitened: dict[str, tuple[Tensor, Tensor | None]] = {}  # advantages and returns by sample

    def all_logprobs(self, rows: list[dict[str, Any]], model: Any = None) -> Tensor:
        return torch.cat([self.logprobs(row, model) for row in rows])

    @torch.no_grad()
    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Take what the weights before an iteration say of its samples."""
        self.old = {row["sample_id"]: self.logprobs(row) for row in rows}
        if self.critic is not None:
            self.old_values = {row["sample_id"]: self.critic.values([row]) for row in rows}
        self.whitened = self.token_credits(rows) if self.config.whiten else {}

    @torch.no_grad()
    def token_credits(self, rows: list[dict[str, Any]]) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Advantages of the rows' tokens and, with a critic, their returns, by sample."""
        stored, lengths = [row["advantage"] for row in rows], [row["response_length"] for row in rows]
        in_reward = self.objective.needs_ref and self.config.kl_placement == "reward"
        advantages, returns = token_credit(
            self.config,
            rewards=torch.tensor(credit(rows, self.config).shaped_rewards, dtype=torch.float64),
            sample_advantages=None if stored[0] is None else torch.tensor(stored),
            mask=torch.tensor([x for row in rows for x in row["loss_mask"]]),
            lengths=torch.tensor(lengths),
            logprobs=torch.cat([self.old[row["sample_id"]] for row in rows]),
            ref_logprobs=self.all_logprobs(rows, self.reference) if in_reward else None,
            teacher_logprobs=self.all_logprobs(rows, self.teacher) if self.teacher is not None else None,
            values=torch.cat([self.old_values[row["sample_id"]] for row in rows]) if self.critic else None,
            kl_coef=self.controller.value,
        )
        parts = zip(
            (row["sample_id"] for row in rows),
            advantages.float().split(lengths),
            [None] * len(rows) if returns is None else returns.split(lengths),
            strict=True,
        )
        return {name: (part, returned) for name, part, returned in parts}

    def learn(self, rows: list[dict[str, Any]], version: int) -> dict[str, float]:
        """One step on these rows; its figures."""
        c = self.config
        lengths = torch.tensor([row["response_length"] for row in rows])
        mask = torch.tensor([x for row in rows for x in row["loss_mask"]])
        sums = torch.tensor([sum(row["loss_mask"]) for row in rows])
        old = torch.cat([self.old[row["sample_id"]] for row in rows])
        values = torch.cat([self.old_values[row["sample_id"]] for row in rows]) if self.critic else None
        with torch.no_grad():
            ref = self.all_logprobs(rows, self.reference) if self.objective.needs_ref else None
        parts = self.whitened or self.token_credits(rows)
        credits = [parts[row["sample_id"]] for row in rows]
        self.objective.kl_coef = self.controller.value
        loss, metrics = self.objective(
            TokenBatch(
                logprobs=self.all_logprobs(rows),
                old_logprobs=old,
                rollout_logprobs=torch.tensor([x for row in rows for x in row["rollout_logprobs"]]),
                ref_logprobs=ref,
                advantages=torch.cat([advantages for advantages, _ in credits]),
                mask=mask,
                lengths=lengths,
                weights=spread(sample_weights(sums, c, max_length=16), lengths),
            )
        )
        step_metrics = {"loss": float(loss.detach()), "grad_norm": 0.0}
        if self.objective.needs_ref:
            step_metrics["kl_coef"] = self.controller.value
        if self.critic is not None:
            assert c.critic is not None
            assert values is not None
            returns = torch.cat([returned for _, returned in credits if returned is not None])
            each = value_loss(self.critic.values(rows), values, returns, clip=c.critic.clip)
            error = (each * mask).sum() / mask.sum()
            for group in self.critic.optimizer.param_groups:
                group["lr"] = self.critic_rates.get(version, group["lr"])
            step_metrics["value_loss"] = float(error.detach())
            step_metrics["critic_grad_norm"] = clipped_step(error, self.critic.optimizer, CLIP_GRAD)
        if c.critic is None or version > c.critic.only_steps:
            step_metrics["grad_norm"] = self.step(loss)
            if "kl" in metrics:
                value, weight = metrics["kl"]
                self.controller.update(float(value / weight), len(rows))
        if c.reference_update_steps and version % c.reference_update_steps == 0:
            self.reference.load_state_dict(self.model.state_dict())
        return step_metrics


def credit(rows: list[dict[str, Any]], config: Algorithm) -> SampleCredit:
    """What the filter would store of these rows, four to a group."""
    samples = ScoredSamples(
        rewards=[row["reward"] for row in rows],
        group_ids=[i // 4 for i in range(len(rows))],
        lengths=[row["response_length"] for row in rows],
        truncated=[row["status"] == "truncated" for row in rows],
    )
    return sample_credit(samples, config, 16)


def scored(rows: list[dict[str, Any]], config: Algorithm) -> list[dict[str, Any]]:
    """Rows with rewards that vary, and the credit that the filter would store."""
    for i, row in enumerate(rows):
        row["reward"] = float((i * 7 + len(row["tokens"])) % 3) / 2
    shaped, advantages = credit(rows, config)
    for i, row in enumerate(rows):
        row["shaped_reward"] = shaped[i]
        row["advantage"] = None if advantages is None else advantages[i]
    return rows
