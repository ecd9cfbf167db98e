"""Forward and backward passes of packs through a model under FSDP."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from millrace.connectors.trainers.compute_type import compute_type
from millrace.connectors.trainers.fsdp.packed_model import PackedModel, parts_of_units
from millrace.connectors.trainers.ops.fused import plain_forms, take_rows
from millrace.connectors.trainers.ops.logprobs import TokenLogprobs, WholeVocabulary, token_logprobs
from millrace.connectors.trainers.packing import Pack
from millrace.connectors.trainers.passes import LogprobPasses, Metrics, MetricSums
from millrace.connectors.trainers.place import RankPlace
from millrace.core.config import RunConfig
from millrace.core.waits import beat

WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


class FsdpPasses(LogprobPasses):
    """Passes through one model of this rank, and log-probabilities from its output layer."""

    def __init__(
        self, config: RunConfig, model: PackedModel, place: RankPlace, device: Any, temperature: float
    ) -> None:
        super().__init__(config, place, device)
        self.model = model
        self.temperature = temperature
        # reference answers are those of the whole vocabulary, as texts are
        self._unsampled = None if model.sight is None or config.algorithm.supervised else model.sight.marks
        self._wide: torch.dtype | None = None

    def _train(self, mode: bool) -> None:
        """Nothing: the model stays in evaluation mode, without dropout."""

    def _run(
        self, packs: Sequence[Pack], loss: Callable[[Pack, Tensor], Tensor], *, forward_only: bool
    ) -> None:
        for pack in packs:
            beat()
            total = self.model(pack, partial(loss, pack))
            beat()
            if not forward_only:
                total.backward()

    def text_logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """Of the whole vocabulary: engines are asked without the rule for answers to prompts with pictures."""
        unsampled, self._unsampled = self._unsampled, None
        try:
            return self.logprobs(packs)
        finally:
            self._unsampled = unsampled

    def wider_logprobs(self, packs: Sequence[Pack]) -> Tensor | None:
        """The same as `logprobs`, with the weights' values in the next wider type, and computed in it."""
        narrow = compute_type(self.config)
        self._wide = WIDER[narrow]
        try:
            with plain_forms(), computing_in(self.model, self._wide):
                return self.logprobs(packs)
        finally:
            self._wide = None

    def token_logprobs(
        self,
        pack: Pack,
        hidden: Tensor,
        *,
        entropy: bool,
        entropy_gradient: bool = True,
        others: bool = False,
    ) -> TokenLogprobs:
        """Log-probabilities [N] of the whole pack's response tokens, and entropies, on every context parallel rank.

        Only within the model's forward pass.

        others: also return log-probabilities [N, k] of the pack's other tokens.
        """
        weight, marks = self.model.head, self._unsampled
        assert not (others and marks is not None), "teachers see no pictures"
        found = token_logprobs(
            take_rows(hidden.squeeze(1), pack.places).to(weight.dtype),
            weight,
            pack.targets,
            vocab=self.model.vocab,
            group=WholeVocabulary(),
            temperature=self.temperature,
            chunk=self.config.trainer.logprob_chunk_tokens,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            others=(pack.others if others else None)
            if marks is None
            else marks.expand(len(pack.targets), -1),
        )
        return self.gathered(pack, found if marks is None else _without(found))

    def router_losses(
        self, packs: Sequence[Pack], tokens: int, samples: int, sums: MetricSums
    ) -> contextlib.AbstractContextManager[None]:
        """Routers have no losses here."""
        return contextlib.nullcontext()

    def expert_metrics(self) -> Metrics:
        """Empty: the Hugging Face model routes."""
        return {}


def _without(found: TokenLogprobs) -> TokenLogprobs:
    """The values of a distribution whose `others` have no probability: engines never sample what stands for pictures."""
    assert found.others is not None
    shares = found.others.exp()
    left = torch.log1p(-shares.sum(-1))  # log of the probability of all other tokens
    entropies = found.entropies
    if entropies is not None:
        entropies = (entropies + (shares * found.others).sum(-1)) / left.exp() + left
    return TokenLogprobs(found.targets - left, entropies, None)


@contextlib.contextmanager
def computing_in(model: PackedModel, wide: torch.dtype) -> Iterator[None]:
    """A context in which forward passes compute in another type, without gradients. Every rank must enter it.

    A unit's gathered weights are replaced by cast copies while it runs: one unit's, and those of the root, exist at a time.
    """
    hooks = []
    for unit, parts in parts_of_units(model):
        cast = _Cast(parts, wide)
        hooks.append(unit.register_forward_pre_hook(cast.before))
        # before FSDP's own hook, which frees the gathered weights
        hooks.append(unit.register_forward_hook(cast.after, prepend=True, always_call=True))
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Cast:
    def __init__(self, parts: Sequence[Module], wide: torch.dtype) -> None:
        self._parts = parts
        self._wide = wide
        self._own: list[tuple[Module, str, Parameter]] = []

    def before(self, *_: Any) -> None:
        assert not self._own, "a unit runs once at a time"
        copies: dict[int, Parameter] = {}
        for part in self._parts:
            for name, weight in part.named_parameters(recurse=False):
                self._own.append((part, name, weight))
                if id(weight) not in copies:  # a tied weight has one copy
                    copies[id(weight)] = Parameter(weight.detach().to(self._wide), requires_grad=False)
                setattr(part, name, copies[id(weight)])

    def after(self, *_: Any) -> None:
        for part, name, weight in self._own:
            setattr(part, name, weight)
        self._own.clear()
