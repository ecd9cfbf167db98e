"""Continuous batching over the slot cache: one thread owns the model, requests come and go.

Owns admission, decoding, stopping, pausing and weight versions; knows nothing of HTTP. Running requests occupy the
first slots; a finished one's slot is filled by the last, so that a decode step sees one contiguous batch.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from connectors.embedded.model import (
    PREFILL_SPAN,
    ROWS,
    SPAN,
    Cache,
    Decoder,
    ModelError,
    Shape,
    Weights,
    read_tensors,
)
from connectors.embedded.sampling import RequestError, SamplingParams, penalise, sample, uniform
from connectors.embedded.text import Text

PREFIXES = 128  # prompts whose keys and values are kept


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
    arrived: float = field(default_factory=time.time)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)  # {version, start, end} over output tokens
    cached_tokens: int = 0
    slot: int = -1
    finish: dict[str, Any] | None = None
    stopped_text: str | None = None  # text up to a stop string, when one ended the request

    @property
    def length(self) -> int:
        """Tokens whose keys and values the request needs."""
        return len(self.prompt) + len(self.output)

    @property
    def longest(self) -> int:
        """Tokens it may grow to."""
        return len(self.prompt) + self.params.max_new_tokens


@dataclass
class _Prefix:
    """Keys, values and last hidden state of a prompt."""

    layers: list[tuple[Tensor, Tensor]]
    hidden: Tensor


@dataclass(eq=False)
class _Job:
    """Something to run between two steps, and how it ended."""

    run: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    value: Any = None
    error: BaseException | None = None


class Engine:
    """Serves one model from one thread."""

    def __init__(
        self,
        folder: str,
        *,
        max_running: int,
        max_total_tokens: int,
        weight_version: str,
        seed: int | None,
        finished_log: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.shape = Shape.read(self.folder)
        self.decoder = Decoder(Weights(self.shape, read_tensors(self.folder)))
        self.text = Text(self.folder)
        self.weight_version = weight_version
        self.max_running = max_running
        self.max_total_tokens = max_total_tokens
        self.paused = False
        self.released: set[str] = set()
        self.counters = {"requests": 0, "finished": 0, "aborted": 0, "tokens": 0, "steps": 0}
        self._finished_log = open(finished_log, "a", buffering=1) if finished_log else None  # noqa: SIM115
        self._seeds = torch.Generator().manual_seed(seed if seed is not None else secrets.randbits(62))
        self._cache = Cache(self.shape, 0, 0, self._dtype)
        self._running: list[Request] = []
        self._admitting: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._prefixes: OrderedDict[tuple[int, ...], _Prefix] = OrderedDict()
        self._jobs: deque[_Job] = deque()
        self._idle_jobs: deque[_Job] = (
            deque()
        )  # wait until nothing is in a slot; nothing is admitted meanwhile
        self._wake = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.failure: BaseException | None = None

    @property
    def _dtype(self) -> torch.dtype:
        return self.decoder.weights.embedding.dtype

    def start(self) -> None:
        """Begin serving."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join(timeout=10)

    # requests

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise RequestError for what can never be served."""
        if not prompt:
            raise RequestError("input_ids: empty")
        bad = next((token for token in prompt if not 0 <= token < self.shape.vocab), None)
        if bad is not None:
            raise RequestError(f"input_ids: token {bad} is not in the vocabulary of {self.shape.vocab}")
        need = len(prompt) + params.max_new_tokens
        limit = min(self.shape.positions, self.max_total_tokens)
        if need > limit:
            raise RequestError(
                f"input_ids: {len(prompt)} tokens and sampling_params.max_new_tokens = {params.max_new_tokens} need "
                f"{need} positions, the limit is {limit}"
            )
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        self._check_tokens("logit_bias", map(int, params.logit_bias))

    def _check_tokens(self, field_name: str, tokens: Iterable[int]) -> None:
        bad = next((token for token in tokens if not 0 <= token < self.shape.vocab), None)
        if bad is not None:
            raise RequestError(
                f"sampling_params.{field_name}: token {bad} is not in the vocabulary of {self.shape.vocab}"
            )

    def submit(self, request: Request) -> None:
        """Queue a request; its `notify` is called after each of its tokens and at its end."""
        with self._wake:
            if self.failure:
                raise RequestError(f"the engine failed: {self.failure}; restart it")
            self.counters["requests"] += 1
            self._waiting.append(request)
            self._wake.notify()

    def draw_seed(self) -> int:
        """A seed for a request that brought none."""
        return int(torch.randint(0, 2**62, (1,), generator=self._seeds))

    def abort(self, rid: str, everything: bool = False) -> int:
        """End requests whose rid starts with `rid`, with what they have."""
        return int(self.call(lambda: self._abort(lambda r: everything or r.rid.startswith(rid))))

    def withdraw(self, requests: list[Request]) -> None:
        """End these very requests, whatever others are called."""
        self.call(lambda: self._abort(lambda r: any(r is one for one in requests)))

    def call(self, run: Callable[[], Any], *, when_idle: bool = False) -> Any:
        """Run something between two steps, in the engine's thread; its exception is raised here.

        With `when_idle` it waits until nothing is in a slot, unless the engine is paused; new requests wait for it.
        """
        job = _Job(run)
        with self._wake:
            if self.failure:
                raise RequestError(f"the engine failed: {self.failure}; restart it")
            (self._idle_jobs if when_idle else self._jobs).append(job)
            self._wake.notify()
        job.done.wait()
        if job.error is not None:
            raise job.error
        return job.value

    def load(self) -> dict[str, int]:
        """Requests and tokens held right now."""
        running = list(self._running)
        return {
            "running": len(running),
            "waiting": len(self._waiting),
            "tokens": sum(r.length for r in running),
        }

    # control; all within `call`

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop stepping. abort ends what runs; retract drops its keys and values; in_place keeps them."""
        if mode == "abort":
            self._abort(lambda request: True)
        elif mode == "retract":
            self._retract()
        self.paused = True

    def _retract(self) -> None:
        """Put running requests back in front of the queue; they are prefilled again with what they generated."""
        for request in reversed(self._running):
            request.slot = -1
            self._waiting.appendleft(request)
        self._running.clear()

    def resume(self) -> None:
        """Go on stepping."""
        self.paused = False

    def flush(self) -> bool:
        """Forget cached prompts; False while anything runs or waits."""
        if self._running or self._waiting:
            return False
        self._prefixes.clear()
        return True

    def replace_weights(self, weights: Weights, version: str) -> None:
        """Serve other weights from the next step on."""
        self.decoder.weights = weights
        self.weight_version = version
        self._prefixes.clear()

    def update_from_disk(self, folder: str, version: str | None) -> None:
        """Load a checkpoint folder. Raises ModelError and goes on with the old weights if it cannot be served."""
        path = Path(folder)
        shape = Shape.read(path)
        if shape != self.shape:
            raise ModelError(f"{folder}: its config.json describes another model than the one served")
        tensors = {name: tensor.to(self._dtype) for name, tensor in read_tensors(path).items()}
        self.check_tensors(tensors)
        self.replace_weights(Weights(shape, tensors), version or self.weight_version)

    def check_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Raise ModelError for a tensor that does not fit the model served."""
        held = self.decoder.weights.tensors
        for name, tensor in tensors.items():
            if name in held and held[name].shape != tensor.shape:
                raise ModelError(
                    f"{name} has shape {list(tensor.shape)}, the model has {list(held[name].shape)}"
                )

    # the loop

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    while not (self._stop or self._jobs or self._idle_jobs_due() or self._can_step()):
                        self._wake.wait()
                    if self._stop:
                        return
                    jobs = list(self._jobs)
                    self._jobs.clear()
                    if self._idle_jobs_due():
                        jobs += self._idle_jobs
                        self._idle_jobs.clear()
                for job in jobs:
                    try:
                        job.value = job.run()
                    except Exception as error:  # noqa: BLE001 - handed to whoever asked
                        job.error = error
                    job.done.set()
                if self._can_step():
                    self._step()
        except BaseException as error:
            self._fail(error)
            raise

    def _idle_jobs_due(self) -> bool:
        return bool(self._idle_jobs) and (self.paused or not self._running)

    def _can_step(self) -> bool:
        return not self.paused and bool(self._running or self._waiting)

    def _fail(self, error: BaseException) -> None:
        """Tell everybody who waits that nothing comes any more."""
        with self._wake:
            self.failure = error
            jobs = [*self._jobs, *self._idle_jobs]
        for job in jobs:
            job.error = RequestError(f"the engine failed: {error}; restart it")
            job.done.set()
        reason = {"type": "abort", "message": f"the engine failed: {error}", "status_code": 500}
        for request in [*self._admitting, *self._running, *self._waiting]:
            if request.finish is None:
                request.slot = -1
                self._finish(request, dict(reason))

    def _step(self) -> None:
        self._admit()
        if not self._running:
            return
        count = len(self._running)
        padded = _padded(count)
        tokens, positions = torch.zeros(padded, dtype=torch.long), torch.zeros(padded, dtype=torch.long)
        tokens[:count] = torch.tensor([r.output[-1] for r in self._running])
        positions[:count] = torch.tensor([r.length - 1 for r in self._running])
        hidden = self.decoder.decode(tokens, positions, self._cache)
        self.counters["steps"] += 1
        self._take_tokens(list(self._running), self.decoder.logits(hidden)[:count])

    def _admit(self) -> None:
        """Move waiting requests into slots, prefill them, and give each its next token."""
        admitted: list[Request] = []
        while self._waiting and not self._idle_jobs and self._fits([*admitted, self._waiting[0]]):
            admitted.append(self._waiting.popleft())
        if not admitted:
            return
        self._admitting = admitted
        self._prepare_cache(admitted)
        last = self._prefill(admitted)
        self._admitting = []
        self._take_tokens(admitted, self.decoder.logits(last))

    def _fits(self, admitted: list[Request]) -> bool:
        """Whether these can run beside what runs. One request alone always can; its slots are padded to ROWS."""
        count = len(self._running) + len(admitted)
        tokens = _padded(count) * self._capacity_for(admitted)
        return count == 1 or (count <= self.max_running and tokens <= self.max_total_tokens)

    def _capacity_for(self, requests: list[Request]) -> int:
        longest = max([r.longest for r in requests] + [r.longest for r in self._running])
        capacity = SPAN
        while capacity < longest:
            capacity *= 2
        return capacity

    def _prepare_cache(self, admitted: list[Request]) -> None:
        """Make the cache wide and long enough for all that will run, within max_total_tokens."""
        old, busy = self._cache, len(self._running)
        slots, capacity = _padded(busy + len(admitted)), self._capacity_for(admitted)
        have = old.keys[0].shape[0] if old.keys else 0
        if busy and old.capacity > capacity and slots * old.capacity <= self.max_total_tokens:
            capacity = old.capacity
        if capacity == old.capacity and slots <= have:
            return
        room = self.max_total_tokens // capacity // ROWS * ROWS
        self._cache = Cache(self.shape, max(slots, min(have, room)), capacity, self._dtype)
        self._cache.take(old, busy)

    def _prefill(self, admitted: list[Request]) -> Tensor:
        """Fill slots for requests; returns the hidden state [n, H] that predicts each one's next token."""
        contexts = [tuple(r.prompt + r.output) for r in admitted]
        missing: dict[int, list[tuple[int, ...]]] = {}
        for context in dict.fromkeys(contexts):
            if context in self._prefixes:
                self._prefixes.move_to_end(context)
            else:
                missing.setdefault(-(-len(context) // PREFILL_SPAN) * PREFILL_SPAN, []).append(context)
        fresh: dict[tuple[int, ...], _Prefix] = {}
        for span, group in sorted(missing.items()):
            per_call = max(1, 8192 // span)
            for at in range(0, len(group), per_call):
                fresh |= self._compute_prefixes(group[at : at + per_call], span)
        hidden = []
        for request, context in zip(admitted, contexts, strict=True):
            prefix = fresh.get(context) or self._prefixes[context]
            request.cached_tokens = 0 if context in fresh else len(context) - 1
            request.slot = len(self._running)
            for number, (keys, values) in enumerate(prefix.layers):
                self._cache.keys[number][request.slot, :, : len(context)] = keys
                self._cache.values[number][request.slot, :, : len(context)] = values
            if request.prompt_logprobs_from >= 0 and not request.prompt_logprobs:
                self._score_prompt(request)
            hidden.append(prefix.hidden)
            self._running.append(request)
        self._prefixes |= fresh
        while len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)
        return torch.stack(hidden)

    def _compute_prefixes(self, contexts: list[tuple[int, ...]], span: int) -> dict[tuple[int, ...], _Prefix]:
        tokens = torch.zeros(len(contexts), span, dtype=torch.long)
        for row, context in enumerate(contexts):
            tokens[row, : len(context)] = torch.tensor(context)
        hidden, layers = self.decoder.prefill(tokens)
        found = {}
        for row, context in enumerate(contexts):
            n = len(context)
            kept = [(keys[row, :, :n].clone(), values[row, :, :n].clone()) for keys, values in layers]
            found[context] = _Prefix(kept, hidden[row, n - 1].clone())
        return found

    def _score_prompt(self, request: Request) -> None:
        """Log-probabilities of the prompt's own tokens, from `prompt_logprobs_from` on."""
        span = -(-len(request.prompt) // PREFILL_SPAN) * PREFILL_SPAN
        tokens = torch.zeros(1, span, dtype=torch.long)
        tokens[0, : len(request.prompt)] = torch.tensor(request.prompt)
        hidden, _ = self.decoder.prefill(tokens)
        logits = self.decoder.logits(hidden[0]) / (request.params.temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        start = request.prompt_logprobs_from
        for at in range(start, len(request.prompt)):
            token = request.prompt[at]
            request.prompt_logprobs.append((None if at == 0 else float(logprobs[at - 1, token]), token))

    def _take_tokens(self, requests: list[Request], logits: Tensor) -> None:
        """Sample each request's next token and see whether it ends."""
        rows = (
            logits.clone() if any(r.params.penalised or r.params.min_new_tokens for r in requests) else logits
        )
        for row, request in enumerate(requests):
            if request.params.penalised:
                rows[row] = penalise(rows[row], request.params, request.prompt, request.output)
            enders = self._enders(request)
            if enders and len(request.output) < request.params.min_new_tokens:
                rows[row, list(enders)] = float("-inf")
        draws = [uniform(r.seed, len(r.output)) for r in requests]
        tokens, logprobs = sample(rows, [r.params for r in requests], draws)
        picked = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            request.output.append(token)
            request.logprobs.append(picked[row])
            if request.top_logprobs:
                values, ids = logprobs[row].topk(request.top_logprobs)
                request.tops.append(list(zip(values.tolist(), ids.tolist(), strict=True)))
            self._note_version(request)
            request.finish = self._ending(request, token)
        self.counters["tokens"] += len(requests)
        for request in requests:
            if request.finish:
                self._finish(request, request.finish)
            else:
                request.notify(request)

    def _note_version(self, request: Request) -> None:
        end = len(request.output)
        if request.spans and request.spans[-1]["version"] == self.weight_version:
            request.spans[-1]["end"] = end
        else:
            request.spans.append({"version": self.weight_version, "start": end - 1, "end": end})

    def _enders(self, request: Request) -> set[int]:
        ends = set(request.params.stop_token_ids)
        return ends if request.params.ignore_eos else ends | self.text.eos

    def _ending(self, request: Request, token: int) -> dict[str, Any] | None:
        """Why a request is over, if it is."""
        if token in self._enders(request):
            return {"type": "stop", "matched": token}
        if request.params.stop and len(request.output) >= max(1, request.params.min_new_tokens):
            found = self.text.find_stop(request.output, request.params)
            if found:
                request.stopped_text = found.text
                return {"type": "stop", "matched": found.stop}
        if len(request.output) >= request.params.max_new_tokens:
            return {"type": "length", "length": request.params.max_new_tokens}
        return None

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        aborted = reason["type"] == "abort"
        self.counters["aborted" if aborted else "finished"] += 1
        if self._finished_log and not aborted:
            self._finished_log.write(f"{request.rid}\n")
        if request.slot >= 0:
            last = self._running.pop()
            if last is not request:
                self._cache.move(last.slot, request.slot, last.length)
                last.slot = request.slot
                self._running[request.slot] = last
            request.slot = -1
        request.notify(request)

    def _abort(self, chosen: Callable[[Request], bool]) -> int:
        ending = [r for r in [*self._running, *self._waiting] if chosen(r)]
        for request in ending:
            if request.slot < 0:
                self._waiting.remove(request)
            message = {
                "type": "abort",
                "message": "aborted by request",
                "status_code": 200,
                "err_type": "Abort",
            }
            self._finish(request, message)
        return len(ending)


def _padded(count: int) -> int:
    """Slots for a number of requests."""
    return -(-count // ROWS) * ROWS
