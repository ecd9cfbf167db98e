"""Models that are not trained: the reference (the policy at an earlier version) and a teacher.

Owns the place of their weights. Knows nothing of the use of their log-probabilities.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from millrace.connectors.trainers.adapters import trained
from millrace.connectors.trainers.packing import BatchRow
from millrace.connectors.trainers.passes import LogprobPasses
from millrace.connectors.trainers.rank_batch import RankBatch
from millrace.core.errors import TrainerError

OF_A_FOLDER = -1  # the version of a reference from another folder


class Reference:
    """Parameters of the policy's architecture in host memory, swapped into the policy's model for a forward pass.

    With adapters only they are copied: the weights beside them are the policy's own.
    """

    version: int  # the weight version of the copy
    weights: dict[str, Tensor]  # this rank's, by the names of the policy's parameters

    def __init__(self, policy: Module, version: int = 0, *, adapted: bool = False) -> None:
        """Copy the current weights of the policy's model. version: OF_A_FOLDER if they are not the run's. adapted: whether the
        policy has adapters."""
        self._policy = policy
        self._adapted = adapted
        self.copy_policy(version)

    def copy_policy(self, version: int) -> None:
        """Copy the policy's current weights, which have this version."""
        changed = trained(self._policy) if self._adapted else self._policy.named_parameters()
        self.weights = {name: held(value).to("cpu", copy=True) for name, value in changed}
        self.version = version

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[None]:
        """A context in which the policy's model has the reference's weights."""
        parameters = {name: held(value) for name, value in self._policy.named_parameters()}
        policy_weights = {name: parameters[name].clone() for name in self.weights}
        with torch.no_grad():
            for name, value in self.weights.items():
                parameters[name].copy_(value)
            try:
                yield
            finally:
                for name, value in policy_weights.items():
                    parameters[name].copy_(value)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take stored weights of this version; names that the reference does not have are left out."""
        for name, value in self.weights.items():
            if name in weights:
                value.copy_(weights[name])
        self.version = version


def held(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, without gradients."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    with torch.no_grad():  # DTensor's own `detach` takes longer than the step of a small parameter
        return parameter.to_local().detach()


class Teacher:
    """A second model, in the policy's parallel layout, whose log-probabilities are distilled."""

    def __init__(self, passes: LogprobPasses, vocab: int) -> None:
        self.passes = passes
        self._vocab = vocab

    def check_tokens(self, rows: Sequence[BatchRow]) -> None:
        """Raise TrainerError if a token is not in the vocabulary. `rows`: all samples, so that all ranks raise or none does."""
        highest = max((int(row.tokens.max()) for row in rows), default=0)
        if highest >= self._vocab:
            raise TrainerError(
                f"a sample has token {highest}, the teacher's vocabulary {self._vocab} tokens",
                where="algorithm.teacher",
                remedy="take a teacher with the model's own tokenizer",
            )

    def logprobs(self, batch: RankBatch) -> Tensor | None:
        """Log-probabilities of the batch's response tokens; None before the last pipeline stage."""
        return self.passes.logprobs(batch.packs)
