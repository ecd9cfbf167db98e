"""The slots of the KV cache: which request holds which, and their keys and values.

Owns the cache's size, the cached prompts, prefill and one step of decoding; knows nothing of queues, of sampling or of why a
request ends. Running requests occupy the first slots. The last request moves to a freed slot, so that a decode step has one
contiguous batch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from millrace.connectors.engines.embedded.adapters import Adapter
from millrace.connectors.engines.embedded.model import (
    PREFILL_SPAN,
    ROWS,
    SPAN,
    AnyDecoder,
    Cache,
    Pair,
    rounded_up,
)
from millrace.connectors.engines.embedded.sampling import SamplingParams, likeliest
from millrace.connectors.engines.embedded.seen_images import SeenImages

PREFIXES = 128  # prompts whose keys and values are cached


@dataclass(eq=False)
class Request:
    """One generation, from arrival to its last token."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    notify: Callable[[Request], None]
    top_logprobs: int = 0
    prompt_logprobs_from: int = -1
    routed_from: int = -1  # the first token whose experts are returned; -1: none are
    given: int = 0  # tokens of the output that came with the request, which continues them
    adapter: Adapter | None = None  # None: the weights alone
    priority: int = 0  # of waiting requests the smallest comes first
    arrived: float = field(default_factory=time.time)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    prompt_tops: list[list[tuple[float, int]] | None] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)  # {version, start, end} over output tokens
    routed: list[Tensor] = field(default_factory=list)  # experts of the tokens fed so far, see `Decoder`
    cached_tokens: int = 0
    slot: int = -1
    finish: dict[str, Any] | None = None
    stopped_text: str | None = None  # the text before the stop string that ended the request
    seen: SeenImages | None = None  # the pictures of the prompt

    @property
    def length(self) -> int:
        """The number of tokens whose keys and values the request needs."""
        return len(self.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """The number of tokens that it may grow to. max_new_tokens includes given output."""
        return len(self.prompt) + self.params.max_new_tokens

    def note_routed(self, experts: Tensor, first: int) -> None:
        """Note the experts of the tokens from `first` on. Tokens that were fed before, and are fed again, keep theirs: these
        experts belong to the pass that sampled the next token."""
        assert first <= len(self.routed), "tokens are fed in their order"
        self.routed += experts[len(self.routed) - first :].unbind()


class _Context(NamedTuple):
    """Tokens whose keys and values are computed together; other adapters and pictures make others of the same tokens."""

    adapter: Adapter | None
    tokens: tuple[int, ...]
    seen: SeenImages | None


@dataclass
class _Prefix:
    """What the cache holds of a prompt, its last hidden state and its experts."""

    layers: list[Pair]
    hidden: Tensor
    experts: Tensor


class Slots:
    """The running requests and their cache."""

    def __init__(self, decoder: AnyDecoder, *, max_running: int, max_total_tokens: int) -> None:
        self.running: list[Request] = []
        self.cache = Cache(decoder.shape, 0, 0, decoder.cache_dtype)
        self._decoder = decoder
        self._max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._prefixes: OrderedDict[_Context, _Prefix] = OrderedDict()

    def admit(self, requests: list[Request]) -> Tensor:
        """Give requests slots and prefill them; returns the logits [n, V] of each one's next token."""
        self._prepare_cache(requests)
        return self._decoder.logits(self._prefill(requests))

    def step(self) -> Tensor:
        """Decode one token of all running requests; returns the logits [n, V] of each one's next token."""
        count = len(self.running)
        padded = rounded_up(count, ROWS)
        tokens, positions = torch.zeros(padded, dtype=torch.long), torch.zeros(padded, dtype=torch.long)
        tokens[:count] = torch.tensor([r.output[-1] for r in self.running])
        positions[:count] = torch.tensor([r.length - 1 for r in self.running])
        adapters = [r.adapter for r in self.running]
        turned: dict[str, Tensor] = {}
        if any(r.seen for r in self.running):
            turned["turns"] = positions.clone()
            turned["turns"][:count] -= torch.tensor([r.seen.behind if r.seen else 0 for r in self.running])
        hidden, experts = self._decoder.decode(tokens, positions, self.cache, adapters, **turned)
        for request, row in zip(self.running, experts[:count], strict=True):
            if request.routed_from >= 0:
                request.note_routed(row[None], request.length - 1)
        return self._decoder.logits(hidden)[:count]

    def free(self, request: Request) -> None:
        """Free a request's slot, if it has one."""
        if request.slot < 0:
            return
        last = self.running.pop()
        if last is not request:
            self.cache.move(last.slot, request.slot, last.length)
            last.slot = request.slot
            self.running[request.slot] = last
        request.slot = -1

    def clear(self) -> None:
        """Free the slots of all running requests."""
        for request in self.running:
            request.slot = -1
        self.running.clear()

    def forget_prompts(self) -> None:
        """Drop the cached prompts."""
        self._prefixes.clear()

    def fits(self, admitted: list[Request]) -> bool:
        """Whether these requests fit beside the running ones. A single request always fits. Slots are padded to ROWS."""
        count = len(self.running) + len(admitted)
        tokens = rounded_up(count, ROWS) * self._capacity_for(admitted)
        return count == 1 or (count <= self._max_running and tokens <= self._max_total_tokens)

    @property
    def held(self) -> int:
        """Tokens of the cache that running requests keep from others: each takes its share of the slots that fit, which are padded."""
        if not self.running:
            return 0
        fit = self._max_total_tokens // self.cache.capacity // ROWS * ROWS
        return (
            self._max_total_tokens * len(self.running) // max(len(self.running), min(fit, self._max_running))
        )

    def _capacity_for(self, requests: list[Request]) -> int:
        longest = max([r.longest for r in requests] + [r.longest for r in self.running])
        capacity = SPAN
        while capacity < longest:
            capacity *= 2
        return capacity

    def _prepare_cache(self, admitted: list[Request]) -> None:
        """Make the cache wide and long enough for all requests that will run, within max_total_tokens."""
        old, busy = self.cache, len(self.running)
        slots, capacity = rounded_up(busy + len(admitted), ROWS), self._capacity_for(admitted)
        have = old.slots
        if busy and old.capacity > capacity and slots * old.capacity <= self._max_total_tokens:
            capacity = old.capacity
        if capacity == old.capacity and slots <= have:
            return
        room = self._max_total_tokens // capacity // ROWS * ROWS
        dtype = self._decoder.cache_dtype
        self.cache = Cache(self._decoder.shape, max(slots, min(have, room)), capacity, dtype)
        self.cache.take(old, busy)

    def _prefill(self, admitted: list[Request]) -> Tensor:
        """Fill slots for requests; returns the hidden state [n, H] that predicts each one's next token."""
        contexts = [_Context(r.adapter, tuple(r.prompt + r.output), r.seen) for r in admitted]
        missing: dict[int, list[_Context]] = {}
        for context in dict.fromkeys(contexts):
            if context in self._prefixes:
                self._prefixes.move_to_end(context)
            else:
                missing.setdefault(rounded_up(len(context.tokens), PREFILL_SPAN), []).append(context)
        fresh: dict[_Context, _Prefix] = {}
        for span, group in sorted(missing.items()):
            per_call = max(1, 8192 // span)
            for at in range(0, len(group), per_call):
                fresh |= self._compute_prefixes(group[at : at + per_call], span)
        hidden = []
        for request, context in zip(admitted, contexts, strict=True):
            prefix = fresh.get(context) or self._prefixes[context]
            length = len(context.tokens)
            request.cached_tokens = 0 if context in fresh else length - 1
            request.slot = len(self.running)
            self.cache.fill(request.slot, prefix.layers, length)
            if request.prompt_logprobs_from >= 0 and not request.prompt_logprobs:
                self.score_prompt(request)
            if request.routed_from >= 0:
                request.note_routed(prefix.experts, 0)
            hidden.append(prefix.hidden)
            self.running.append(request)
        self._prefixes |= fresh
        while len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)
        return torch.stack(hidden)

    def _compute_prefixes(self, contexts: list[_Context], span: int) -> dict[_Context, _Prefix]:
        tokens = torch.zeros(len(contexts), span, dtype=torch.long)
        for row, context in enumerate(contexts):
            tokens[row, : len(context.tokens)] = torch.tensor(context.tokens)
        lengths = torch.tensor([len(context.tokens) for context in contexts])
        adapters = [context.adapter for context in contexts]
        seen = _told([context.seen for context in contexts])
        hidden, layers, experts = self._decoder.prefill(tokens, lengths, adapters, **seen)
        found = {}
        for row, context in enumerate(contexts):
            n = len(context.tokens)
            kept = [
                (self.cache.held(number, one[row], n).clone(), self.cache.held(number, other[row], n).clone())
                for number, (one, other) in enumerate(layers)
            ]
            found[context] = _Prefix(kept, hidden[row, n - 1].clone(), experts[row, :n].clone())
        return found

    def score_prompt(self, request: Request) -> None:
        """Log-probabilities of the prompt's tokens, from `prompt_logprobs_from` on; the prompt's first token has none.

        Always at temperature 1, like SGLang.
        """
        span = rounded_up(len(request.prompt), PREFILL_SPAN)
        tokens = torch.zeros(1, span, dtype=torch.long)
        tokens[0, : len(request.prompt)] = torch.tensor(request.prompt)
        seen = _told([request.seen])
        hidden, _, _ = self._decoder.prefill(tokens, adapters=[request.adapter], **seen)
        start = request.prompt_logprobs_from
        logprobs = self._decoder.logits(hidden[0, start : len(request.prompt)]).log_softmax(-1)
        for at in range(start, len(request.prompt)):
            token = request.prompt[at]
            value = None if at == start else float(logprobs[at - 1 - start, token])
            request.prompt_logprobs.append((value, token))
            if request.top_logprobs:
                request.prompt_tops.append(
                    None if at == start else likeliest(logprobs[at - 1 - start], request.top_logprobs)
                )


def _told(seen: list[SeenImages | None]) -> dict[str, Any]:
    """What a decoder is told of the pictures of texts; nothing if there are none."""
    return {"seen": seen} if any(seen) else {}
