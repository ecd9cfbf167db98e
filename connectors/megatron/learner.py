"""The policy with everything that its algorithm needs beside it: critic, reference, teacher, KL coefficient.

Owns what is computed when: figures of the weights before an iteration at its first step, everything else step by step;
and the algorithm's own state, which a checkpoint holds. Knows nothing of files, versions asked for or actors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from millrace.connectors.megatron.critic import Critic, explained_variance
from millrace.connectors.megatron.forward_backward import LanguageRunner, Sums, merged
from millrace.connectors.megatron.frozen_models import Reference, Teacher
from millrace.connectors.megatron.packing import Row, packs_of
from millrace.connectors.megatron.policy_step import policy_step
from millrace.connectors.megatron.rank_batch import Share, share_of
from millrace.connectors.megatron.trainable_model import Trained, from_hf
from millrace.core.algorithms.objective import Objective, derived, on_policy_guard
from millrace.core.algorithms.schedule import KLController, shape_rewards
from millrace.core.algorithms.token_advantages import token_advantages
from millrace.core.architecture import architecture
from millrace.core.config import RunConfig
from millrace.core.errors import RefusedStepError, TrainerError


class Learner:
    """All models of this rank."""

    def __init__(self, config: RunConfig, hf: dict[str, Any], device: Any) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.device = device
        self.shape = architecture(hf)
        self.objective = Objective(self.algorithm)
        self.controller = KLController(self.algorithm)
        inner = from_hf(config, config.model.path, hf, device)
        self.policy = Trained(inner, config, config.trainer.optimizer.lr)
        temperature = 1.0 if self.objective.supervised else config.rollout.sampling.temperature
        self.runner = LanguageRunner(
            config, self.policy.model, inner, device, vocab=hf["vocab_size"], temperature=temperature
        )
        self.reference = Reference(inner) if self.objective.needs_ref else None
        self.critic = Critic(config, hf, device) if self.needs_critic else None
        distils = self.algorithm.distillation_coef > 0 and not self.objective.supervised
        self.teacher = Teacher(config, temperature, device) if distils else None
        self._held: tuple[str, int, dict[int, Share]] | None = None  # URL, first step, shares by step

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator looks at values."""
        a = self.algorithm
        return a.advantage == "gae" and a.advantage_function is None and not self.objective.supervised

    def _needs_old(self, steps: int) -> bool:
        """Whether the trainer's log-probabilities from before the iteration need a forward pass."""
        a, o = self.algorithm, self.objective
        if o.supervised or o.ratio_to_rollout:
            return False
        in_advantage = a.distillation_coef > 0 or (a.kl_placement == "reward" and o.needs_ref)
        return in_advantage or (o.needs_old and (steps > 1 or o.needs_recompute))

    # shares and their figures

    def share(self, version: int, batch_url: str, every: Sequence[Row]) -> Share:
        """This rank's part of step `version` of an iteration, with all its figures but advantages.

        Raises TrainerError if figures of the weights before the iteration are missing in its midst.
        """
        if self._held is None or self._held[0] != batch_url:
            first = min(row.train_step for row in every)
            self._held = (batch_url, first, self._begin(version, batch_url, every))
        share = self._held[2][version]
        if self.reference is not None and "ref" not in share.figures:
            with self.reference.in_place():
                self._note(share, "ref", self.runner.logprobs(share.packs))
        if self.teacher is not None and "teacher" not in share.figures:
            self._note(share, "teacher", self.teacher.logprobs(share))
        return share

    def _begin(self, version: int, batch_url: str, every: Sequence[Row]) -> dict[int, Share]:
        steps = sorted({row.train_step for row in every})
        old = self._needs_old(len(steps))
        if (old or self.critic is not None) and version != steps[0]:
            raise TrainerError(
                f"step {version} of {batch_url} needs figures of the weights from before the iteration, which began at step "
                f"{steps[0]}; rebuild the trainer from a checkpoint and replay the iteration from there"
            )
        rewards = self._rewards(every)
        shares = {}
        for step in steps:
            if step < version:
                continue
            chosen = [
                (row, reward) for row, reward in zip(every, rewards, strict=True) if row.train_step == step
            ]
            rows, shaped = [row for row, _ in chosen], [reward for _, reward in chosen]
            shares[step] = share_of(rows, shaped, self.objective, self.config, self.shape, self.device)
            if old:
                self._note(shares[step], "old", self.runner.logprobs(shares[step].packs))
            if self.critic is not None:
                self._note(shares[step], "values", self.critic.values(shares[step]))
        return shares

    def _rewards(self, every: Sequence[Row]) -> list[float]:
        """Rewards that advantages are made of, as the filter shapes them."""
        rewards = torch.tensor([row.reward for row in every], dtype=torch.float64)
        if self.objective.supervised:
            return rewards.tolist()
        lengths = torch.tensor([row.response_length for row in every])
        truncated = torch.tensor([row.truncated for row in every])
        budget = self.config.rollout.sampling.max_new_tokens
        shaped: list[float] = shape_rewards(
            rewards, lengths, truncated, self.algorithm, budget=budget
        ).tolist()
        return shaped

    def _note(self, share: Share, name: str, values: Tensor | None) -> None:
        if values is not None:
            share.figures[name] = values

    def forget(self) -> None:
        """Drop what is held of an iteration."""
        self._held = None

    def logprobs(self, rows: Sequence[Row]) -> tuple[list[Row], Tensor | None]:
        """Rows that this rank worked on and log-probabilities of their response tokens, on the last stage."""
        packs = packs_of(rows, self.config, self.shape, self.device)
        return [row for pack in packs for row in pack.rows], self.runner.logprobs(packs)

    # a step

    def forward_backward(self, share: Share, version: int) -> dict[str, float]:
        """Gradients of every model that this step moves; the step's metrics over all ranks."""
        self.policy.zero_grad()
        self.objective.kl_coef = self.controller.value
        sums: Sums = {}
        if mpu.is_pipeline_last_stage():
            self._estimate(share)
        if self.critic is not None:
            self.critic.trained.zero_grad()
            self.critic.forward_backward(share, sums)
        policy_step(
            self.runner,
            self.objective,
            share,
            sums,
            forward_only=not self.moves_policy(version),
            meanwhile=self.policy.measure_gradient,
        )
        means = {
            name: value if math.isnan(amount) or not amount else value / amount
            for name, (value, amount) in merged(sums).items()
        }
        means = derived(means)
        if self.objective.needs_ref:
            means["kl_coef"] = self.objective.kl_coef
        return explained_variance(means) if self.critic is not None else means

    def _estimate(self, share: Share) -> None:
        """Advantages and returns of the share's tokens."""
        if self.objective.supervised:
            share.figures["advantages"] = torch.zeros_like(share.mask)
            return
        found = token_advantages(
            self.algorithm,
            rewards=share.rewards,
            sample_advantages=share.sample_advantages,
            mask=share.mask,
            lengths=share.lengths,
            logprobs=share.figures.get("old", share.rollout_logprobs),
            ref_logprobs=share.figures.get("ref"),
            teacher_logprobs=share.figures.get("teacher"),
            values=share.figures.get("values"),
            kl_coef=self.controller.value,
            group=mpu.get_data_parallel_group(),
        )
        share.figures["advantages"] = found.advantages.float()
        if found.returns is not None:
            share.figures["returns"] = found.returns.float()

    def moves_policy(self, version: int) -> bool:
        """Whether a step trains the policy: critic.only_steps come first."""
        return self.critic is None or version > self.algorithm.critic.only_steps

    def guard(self, share: Share, version: int, metrics: dict[str, float]) -> None:
        """Check an iteration's first step: its ratio is against the very weights that are trained.

        Raises RefusedStepError if the ratio is not exactly 1 or the KL not 0 where the reference equals the policy.
        """
        a = self.algorithm
        o = self.objective
        assert self._held is not None
        first = version == self._held[1]
        if not a.on_policy_guard or o.supervised or o.ratio_to_rollout or a.loss_function or not first:
            return
        same = self.reference is not None and self.reference.version == version - 1
        try:
            on_policy_guard({**metrics, "first_kl": metrics["kl"]} if same else metrics)
        except TrainerError as error:
            raise RefusedStepError(
                f"step {version}: {error}; nothing was applied. algorithm.on_policy_guard=false trains on regardless"
            ) from error

    def moved(self, version: int) -> list[tuple[str, Trained]]:
        """What the step applies, by the prefix of its figures."""
        found = [("", self.policy)] if self.moves_policy(version) else []
        return found + ([("critic_", self.critic.trained)] if self.critic is not None else [])

    def applied(self, version: int, metrics: dict[str, float], samples: int) -> None:
        """Move on what follows an applied step: KL coefficient and reference."""
        if not self.moves_policy(version):
            self.policy.skip()
        elif "kl" in metrics:  # the KL of a policy that does not move yet says nothing of the coefficient
            self.controller.update(metrics["kl"], samples)
        every = self.algorithm.reference_update_steps
        if self.reference is not None and every and version % every == 0:
            self.reference.take(version)
        if self._held is not None:
            del self._held[2][version]
            if not self._held[2]:
                self._held = None

    # checkpoints

    @property
    def parts(self) -> list[str]:
        """What a checkpoint holds besides the policy."""
        moving = self.reference is not None and self.algorithm.reference_update_steps
        return (["critic"] if self.critic is not None else []) + (["reference"] if moving else [])

    def sharded_state(self, *, loading: bool) -> dict[str, Any]:
        """The state of all models by shards."""
        state = self.policy.sharded_state(loading=loading)
        if "critic" in self.parts:
            assert self.critic is not None
            state["critic"] = self.critic.trained.sharded_state(loading=loading)
            add_prefix_for_sharding(state["critic"], "critic.")
        if "reference" in self.parts:
            assert self.reference is not None
            state["reference"] = self.reference.sharded_state()
        return state

    def plain_state(self) -> dict[str, Any]:
        """State that is the same on every rank."""
        return {
            "schedule": self.policy.schedule.state_dict(),
            "algorithm": {
                "kl_controller": self.controller.state(),
                "reference_version": self.reference.version if self.reference is not None else 0,
                "critic_schedule": self.critic.trained.schedule.state_dict()
                if self.critic is not None
                else None,
            },
        }

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take a loaded state."""
        self.forget()
        self.policy.load_state(loaded)
        algorithm = loaded.get("algorithm", {})
        self.controller.restore(algorithm.get("kl_controller", {}))
        if "critic" in self.parts:
            assert self.critic is not None
            self.critic.trained.load_state({**loaded["critic"], "schedule": algorithm["critic_schedule"]})
        if "reference" in self.parts:
            assert self.reference is not None
            self.reference.load_state(loaded["reference"], algorithm["reference_version"])
