"""Continuous batching over the slot cache: one thread owns the model, and requests join and leave its batch.

Owns the queue, sampling, stopping, pausing and weight versions; knows nothing of HTTP, nor of the content of slots.
"""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from millrace.connectors.engines.embedded.adapters import Adapter, read_adapter
from millrace.connectors.engines.embedded.model import (
    DTYPES,
    AnyDecoder,
    AnyWeights,
    ModelError,
    make_decoder,
    make_weights,
    read_shape,
    read_tensors,
)
from millrace.connectors.engines.embedded.sampling import (
    RequestError,
    SamplingParams,
    likeliest,
    penalise,
    sample,
    uniform,
)
from millrace.connectors.engines.embedded.slots import Request, Slots
from millrace.connectors.engines.embedded.text import Text
from millrace.connectors.engines.embedded.tower import tower_of
from millrace.connectors.host.torch_trace import TorchTrace
from millrace.core.families.architecture import Architecture
from millrace.core.families.routed_experts import RoutingFormat


@dataclass(eq=False)
class _Job:
    """A function to run between two steps, and its result or error."""

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
        dtype: str = "auto",
        max_adapters: int = 0,
    ) -> None:
        """max_adapters: how many are served by name at the same time. `dtype`: of weights and arithmetic, for the folder and all updates; auto: as the folder stores them.

        Raises ModelError if the folder cannot be served.
        """
        self.folder = Path(folder)
        self.shape = read_shape(self.folder)
        self.routing = RoutingFormat.of(self.shape) if isinstance(self.shape, Architecture) else None
        tensors = read_tensors(self.folder, self.shape, None if dtype == "auto" else DTYPES[dtype])
        self.decoder: AnyDecoder = make_decoder(make_weights(self.shape, tensors, self.folder))
        self.text = Text(self.folder)
        self.weight_version = weight_version
        self.tower = tower_of(self.folder, self.decoder)
        self.adapters: dict[str, Adapter] = {}
        self.max_adapters = max_adapters
        self.max_total_tokens = max_total_tokens
        self.paused = False
        self.released: set[str] = set()
        self.counters = {"requests": 0, "finished": 0, "aborted": 0, "tokens": 0, "steps": 0}
        self._finished_log = open(finished_log, "a", buffering=1) if finished_log else None  # noqa: SIM115
        self._seeds = torch.Generator().manual_seed(seed if seed is not None else secrets.randbits(62))
        self._slots = Slots(self.decoder, max_running=max_running, max_total_tokens=max_total_tokens)
        self._trace: TorchTrace | None = None
        self._trace_folder, self._trace_steps = "", 0  # steps that it still records
        self._admitting: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._jobs: deque[_Job] = deque()
        self._idle_jobs: deque[_Job] = deque()  # wait for empty slots; no request is admitted meanwhile
        self._wake = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join(timeout=10)

    # requests

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise RequestError if the engine can never serve the request."""
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
        """Queue a request. Its `notify` is called after each token and at the end."""
        with self._wake:
            if self.failure:
                raise RequestError(f"the engine failed: {self.failure}; restart it")
            self.counters["requests"] += 1
            at = len(self._waiting)
            while at and self._waiting[at - 1].priority > request.priority:
                at -= 1
            self._waiting.insert(at, request)
            self._wake.notify()

    def draw_seed(self) -> int:
        """A seed for a request without one."""
        return int(torch.randint(0, 2**62, (1,), generator=self._seeds))

    def abort(self, rid: str, everything: bool = False) -> int:
        """End requests whose rid starts with `rid`. They return their tokens so far."""
        return int(self.call(lambda: self._abort(lambda r: everything or r.rid.startswith(rid))))

    def withdraw(self, requests: list[Request]) -> None:
        """End exactly these requests, and no others with the same rid."""
        self.call(lambda: self._abort(lambda r: any(r is one for one in requests)))

    def call(self, run: Callable[[], Any], *, when_idle: bool = False) -> Any:
        """Run a function between two steps, in the engine's thread; its exception is raised here.

        With `when_idle` it waits until all slots are empty, unless the engine is paused; new requests wait for it.
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
        """The current number of requests and tokens. held: tokens of the cache that running requests keep from others."""
        running = list(self._slots.running)
        return {
            "running": len(running),
            "waiting": len(self._waiting),
            "tokens": sum(r.length for r in running),
            "held": self._slots.held,
        }

    # control; call these only through `call`

    def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop stepping. abort ends running requests; retract drops their keys and values; in_place keeps them."""
        if mode == "abort":
            self._abort(lambda request: True)
        elif mode == "retract":
            self._retract()
        self.paused = True

    def _retract(self) -> None:
        """Put running requests back in front of the queue. They will be prefilled again, with their output so far."""
        self._waiting.extendleft(reversed(self._slots.running))
        self._slots.clear()

    def resume(self) -> None:
        """Continue stepping."""
        self.paused = False

    def flush(self) -> bool:
        """Forget cached prompts; False while a request runs or waits."""
        if self._slots.running or self._waiting:
            return False
        self._slots.forget_prompts()
        return True

    def replace_weights(self, weights: AnyWeights, version: str) -> None:
        """Serve these weights from the next step on."""
        decoder: Any = self.decoder  # both kinds hold theirs so
        decoder.weights = weights
        self.weight_version = version
        self._slots.forget_prompts()

    def update_from_disk(self, folder: str, version: str | None) -> None:
        """Load a checkpoint folder. If it cannot be served, raises ModelError and keeps the old weights."""
        path = Path(folder)
        shape = read_shape(path)
        if shape != self.shape:
            raise ModelError(f"{folder}: its config.json describes another model than the one served")
        weights = make_weights(shape, read_tensors(path, shape, self.decoder.weights.dtype), self.folder)
        if self.tower is not None:
            self.tower.read(path)
        self.replace_weights(weights, version or self.weight_version)

    def read_adapter(self, name: str, folder: str) -> Adapter:
        """The adapter in a PEFT folder. Needs no `call`. Raises RequestError if it does not fit the model."""
        if not isinstance(self.shape, Architecture):
            raise RequestError(f"lora_path: adapters of the family {self.shape.family} are not served")
        return read_adapter(name, Path(folder), self.shape, self.decoder.weights.dtype)

    def load_adapter(self, adapter: Adapter) -> None:
        """Serve an adapter by its name from now on. Raises RequestError if the name is taken, or no room is left."""
        name = adapter.name
        if name in self.adapters:
            raise RequestError(f"lora_name: {name} is loaded already, and a name stands for one adapter")
        if len(self.adapters) >= self.max_adapters:
            raise RequestError(
                f"lora_name: {len(self.adapters)} adapters are loaded, --max-loaded-loras allows no more"
            )
        self.adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter; requests that have it keep it. Raises RequestError if it is not loaded."""
        if self.adapters.pop(name, None) is None:
            raise RequestError(f"lora_name: {name} is not loaded")

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter that a request names. Raises RequestError if it is not loaded."""
        if name is not None and name not in self.adapters:
            raise RequestError(f"lora_path: {name} is not loaded")
        return None if name is None else self.adapters[name]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights that it serves and its tower's, by their names in a folder."""
        return {**self.decoder.weights.tensors, **(self.tower.tensors if self.tower else {})}

    def check_tensors(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise ModelError if one is no tensor of the served model, or has another shape."""
        held = self.tensors
        for name, shape in sorted(shapes.items()):
            if name not in held:
                raise ModelError(f"{name} is no tensor of the model served")
            if list(held[name].shape) != list(shape):
                raise ModelError(f"{name} has shape {list(shape)}, the model has {list(held[name].shape)}")

    def replace_tensors(self, tensors: Mapping[str, Tensor], version: str | None) -> None:
        """Serve these in place of what has their names. Raises ModelError as `check_tensors` does."""
        self.check_tensors({name: tensor.shape for name, tensor in tensors.items()})
        held = self.decoder.weights.tensors
        own = {name: tensor.to(held[name].dtype) for name, tensor in tensors.items() if name in held}
        weights = make_weights(self.shape, held | own, self.folder)
        if self.tower is not None:
            self.tower.replace({name: tensor for name, tensor in tensors.items() if name not in held})
        self.replace_weights(weights, self.weight_version if version is None else version)

    def start_trace(self, folder: str, steps: int) -> None:
        """Trace the next steps, which at the end are written to a folder. Raises RequestError if a trace is under way."""
        if self._trace is not None:
            raise RequestError("start_profile: a trace is under way")
        self._trace, self._trace_folder, self._trace_steps = TorchTrace(gpu=False), folder, steps

    def stop_trace(self) -> None:
        """Write the trace. Raises RequestError if none is under way."""
        if self._trace is None:
            raise RequestError("stop_profile: no trace is under way")
        trace, self._trace = self._trace, None
        trace.stop(self._trace_folder, "engine")

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
                    except Exception as error:  # noqa: BLE001 - raised again in the caller's thread
                        job.error = error
                    job.done.set()
                if self._can_step():
                    self._step()
                    self._trace_steps -= 1
                    if self._trace is not None and self._trace_steps <= 0:
                        self.stop_trace()
        except BaseException as error:
            self._fail(error)
            raise

    def _idle_jobs_due(self) -> bool:
        return bool(self._idle_jobs) and (self.paused or not self._slots.running)

    def _can_step(self) -> bool:
        return not self.paused and bool(self._slots.running or self._waiting)

    def _fail(self, error: BaseException) -> None:
        """End all waiting jobs and requests with the error."""
        with self._wake:
            self.failure = error
            jobs = [*self._jobs, *self._idle_jobs]
        for job in jobs:
            job.error = RequestError(f"the engine failed: {error}; restart it")
            job.done.set()
        reason = {"type": "abort", "message": f"the engine failed: {error}", "status_code": 500}
        for request in [*self._admitting, *self._slots.running, *self._waiting]:
            if request.finish is None:
                request.slot = -1
                self._finish(request, dict(reason))

    def _step(self) -> None:
        self._admit()
        if not self._slots.running:
            return
        logits = self._slots.step()
        self.counters["steps"] += 1
        self._take_tokens(list(self._slots.running), logits)

    def _admit(self) -> None:
        """Move waiting requests into slots, prefill them, and give each its next token."""
        admitted: list[Request] = []
        while self._waiting and not self._idle_jobs and self._slots.fits([*admitted, self._waiting[0]]):
            request = self._waiting.popleft()
            if request.params.max_new_tokens:
                admitted.append(request)
            else:  # only its prompt is scored; one such request per step, so that running requests continue
                self._score(request)
                break
        if not admitted:
            return
        self._admitting = admitted
        logits = self._slots.admit(admitted)
        self._admitting = []
        self._take_tokens(admitted, logits)

    def _score(self, request: Request) -> None:
        self._admitting = [request]
        if request.prompt_logprobs_from >= 0:
            self._slots.score_prompt(request)
        self._admitting = []
        self._finish(request, {"type": "length", "length": 0})

    def _take_tokens(self, requests: list[Request], logits: Tensor) -> None:
        """Sample each request's next token, and end the requests that are done."""
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
                request.tops.append(likeliest(logprobs[row], request.top_logprobs))
            self._note_version(request)
            request.finish = self._ending(request, token)
        self.counters["tokens"] += len(requests)
        for request in requests:
            if request.finish:
                self._finish(request, request.finish)
            else:
                request.notify(request)

    def _note_version(self, request: Request) -> None:
        end = len(request.output) - request.given
        if request.spans and request.spans[-1]["version"] == self.weight_version:
            request.spans[-1]["end"] = end
        else:
            request.spans.append({"version": self.weight_version, "start": end - 1, "end": end})

    def _enders(self, request: Request) -> set[int]:
        ends = set(request.params.stop_token_ids)
        return ends if request.params.ignore_eos else ends | self.text.eos

    def _ending(self, request: Request, token: int) -> dict[str, Any] | None:
        """Why a request is done; None if it is not."""
        if token in self._enders(request):
            return {"type": "stop", "matched": token}
        if request.params.stop and len(request.output) >= max(1, request.params.min_new_tokens):
            found = self.text.find_stop(request.output, request.params)
            if found:
                request.stopped_text = found.text
                return {"type": "stop", "matched": found.stop}
        if request.params.stop_regex and len(request.output) >= max(1, request.params.min_new_tokens):
            pattern = self.text.find_pattern(request.output, request.params)
            if pattern is not None:
                return {"type": "stop", "matched": pattern}
        if len(request.output) >= request.params.max_new_tokens:
            return {"type": "length", "length": request.params.max_new_tokens}
        return None

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.finish = reason
        aborted = reason["type"] == "abort"
        self.counters["aborted" if aborted else "finished"] += 1
        if self._finished_log:
            made = len(request.output) - request.given
            self._finished_log.write(f"{request.rid} {reason['type']} {made}\n")
        self._slots.free(request)
        request.notify(request)

    def _abort(self, chosen: Callable[[Request], bool]) -> int:
        ending = [r for r in [*self._slots.running, *self._waiting] if chosen(r)]
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
