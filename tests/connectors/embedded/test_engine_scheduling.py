"""The embedded engine's scheduler without HTTP: slots, limits, aborts, pauses, failures."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.model import ModelError
from millrace.connectors.engines.embedded.sampling import RequestError, SamplingParams
from millrace.connectors.engines.embedded.slots import Request

TIMEOUT_S = 60
PROMPT = [10, 20, 30]


class Job:
    """A request, its first token and its end."""

    def __init__(self, engine: Engine, prompt: list[int], rid: str, **params: Any) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.most_running = 0
        self._engine = engine
        parsed = SamplingParams.parse({"ignore_eos": True, **params})
        engine.check(prompt, parsed)
        self.request = Request(rid=rid, prompt=prompt, params=parsed, seed=5, notify=self._told)
        engine.submit(self.request)

    def _told(self, request: Request) -> None:
        self.most_running = max(self.most_running, self._engine.load()["running"])
        self.begun.set()
        if request.finish:
            self.ended.set()

    def result(self) -> Request:
        assert self.ended.wait(TIMEOUT_S)
        return self.request


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        options = {"max_running": 8, "max_total_tokens": 4096, "weight_version": "0", "seed": 0, **changes}
        made.append(Engine(str(tiny_model), **options))
        made[-1].start()
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


def test_a_queue_longer_than_the_slots_is_served_in_order(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running=8)
    jobs = [Job(engine, [10 + n], f"r{n}", max_new_tokens=10) for n in range(40)]
    assert all(len(job.result().output) == 10 for job in jobs)
    assert max(job.most_running for job in jobs) == 8
    assert engine.load() == {"running": 0, "waiting": 0, "tokens": 0, "held": 0}
    assert engine.counters["tokens"] == 400


def test_requests_wait_while_the_cache_is_full_and_it_never_grows_past_its_limit(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(max_running=64, max_total_tokens=8192)
    seen: list[int] = []
    lengths = [450, 10, 10, 200, 15, 500, 5, 50] * 5
    jobs = []
    for number, length in enumerate(lengths):
        jobs.append(Job(engine, [10 + number], f"r{number}", max_new_tokens=length))
        seen.append(engine.call(lambda: _slots(engine) * engine._slots.cache.capacity))
    for job, length in zip(jobs, lengths, strict=True):
        assert len(job.result().output) == length
        seen.append(engine.call(lambda: _slots(engine) * engine._slots.cache.capacity))
    assert max(seen) <= 8192
    assert max(job.most_running for job in jobs) > 8


def _slots(engine: Engine) -> int:
    return engine._slots.cache.slots


def test_what_can_never_fit_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_total_tokens=256)
    with pytest.raises(RequestError, match="the limit is 256"):
        Job(engine, PROMPT, "r", max_new_tokens=300)


def test_tokens_do_not_depend_on_what_else_is_in_the_batch(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running=64, max_total_tokens=65536)
    mine = {"max_new_tokens": 120, "temperature": 1.3}
    alone = Job(engine, PROMPT, "alone", **mine).result()
    before = [Job(engine, [9 + n % 60] * (1 + n), f"b{n}", max_new_tokens=5 + 4 * n) for n in range(20)]
    among = Job(engine, PROMPT, "among", **mine)
    after = [Job(engine, [9 + n % 60] * (1 + 2 * n), f"a{n}", max_new_tokens=3 + n) for n in range(43)]
    assert among.result().output == alone.output
    assert among.request.logprobs == alone.logprobs
    assert among.most_running > 40
    for job in before + after:
        job.result()


def test_requests_are_aborted_while_queued_and_while_running(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running=8)
    running = [Job(engine, PROMPT, f"running-{n}", max_new_tokens=120) for n in range(8)]
    queued = [Job(engine, PROMPT, f"queued-{n}", max_new_tokens=120) for n in range(4)]
    assert engine.abort("queued") == 4
    for job in queued:
        finish = job.result().finish
        assert finish is not None
        assert finish["type"] == "abort"
        assert job.request.output == []
    assert engine.abort("running-3") == 1
    assert (running[3].result().finish or {})["type"] == "abort"
    for number in (0, 1, 2, 4, 5, 6, 7):
        assert len(running[number].result().output) == 120
    outputs = {tuple(running[number].request.output) for number in (0, 1, 2, 4, 5, 6, 7)}
    assert len(outputs) == 1  # a slot that changed hands kept its owner's tokens


def test_requests_of_one_name_are_withdrawn_one_by_one(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.call(lambda: engine.pause("in_place"))
    first, second, longer = (Job(engine, PROMPT, rid, max_new_tokens=5) for rid in ("a", "a", "ab"))
    engine.withdraw([second.request])
    assert second.ended.is_set()
    assert not first.ended.is_set()
    engine.call(engine.resume)
    assert len(first.result().output) == len(longer.result().output) == 5


def test_a_retracted_request_goes_on_where_it_was(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    mine = {"max_new_tokens": 200, "temperature": 1.0}
    undisturbed = Job(engine, PROMPT, "undisturbed", **mine).result()
    job = Job(engine, PROMPT, "retracted", **mine)
    for _ in range(3):
        engine.call(lambda: engine.pause("retract"))
        assert engine.load()["running"] == 0
        engine.call(engine.resume)
    assert job.result().output == undisturbed.output
    assert job.request.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-5)


def test_an_update_waits_for_what_runs_and_new_requests_wait_for_it(
    make_engine: Callable[..., Engine], other_model: Path
) -> None:
    engine = make_engine()
    early = Job(engine, PROMPT, "early", max_new_tokens=600)
    assert early.begun.wait(TIMEOUT_S)
    done: list[bool] = []

    def update() -> None:
        engine.call(lambda: engine.update_from_disk(str(other_model), "1"), when_idle=True)
        done.append(early.ended.is_set())

    thread = threading.Thread(target=update)
    thread.start()
    while not engine._idle_jobs and thread.is_alive():
        pass
    late = Job(engine, PROMPT, "late", max_new_tokens=5)
    thread.join(TIMEOUT_S)
    assert done == [True]
    assert [span["version"] for span in early.result().spans] == ["0"]
    assert [span["version"] for span in late.result().spans] == ["1"]


def test_an_error_in_a_job_is_its_callers(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(ModelError, match=r"config\.json"):
        engine.call(lambda: engine.update_from_disk(str(tmp_path), "1"))
    assert len(Job(engine, PROMPT, "after", max_new_tokens=2).result().output) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_engine_tells_everybody_who_waits(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_running=8)
    jobs = [Job(engine, PROMPT, f"r{n}", max_new_tokens=500) for n in range(12)]

    def break_it() -> None:
        engine.decoder.weights.head = torch.zeros(1)

    engine.call(break_it)
    for job in jobs:
        assert (job.result().finish or {})["status_code"] == 500
    assert engine.failure is not None
    with pytest.raises(RequestError, match="the engine failed"):
        Job(engine, PROMPT, "late", max_new_tokens=2)
    with pytest.raises(RequestError, match="the engine failed"):
        engine.call(engine.resume)


@pytest.mark.parametrize(
    "config", [None, "{", '{"model_type": "gpt2"}'], ids=["none", "broken", "unsupported"]
)
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=str(tmp_path)):
        Engine(str(tmp_path), max_running=8, max_total_tokens=64, weight_version="0", seed=0)


def test_what_gives_no_finite_logits_harms_no_other_request_beside_it_or_after_it_in_its_slot(
    make_engine: Callable[..., Engine],
) -> None:
    """The next prompt in such a slot had no finite log-probabilities either, from its second token on."""
    whole, broken = make_engine(), make_engine()
    wanted = Job(whole, PROMPT, "r", max_new_tokens=12).result()
    broken.decoder.weights.tensors["model.embed_tokens.weight"][50] = math.inf
    for number in range(2):
        bad = Job(broken, [50, 20, 30, 40 + number], f"bad{number}", max_new_tokens=40)
        beside = Job(broken, PROMPT, f"beside{number}", max_new_tokens=12)
        assert not any(map(math.isfinite, bad.result().logprobs))
        after = Job(broken, PROMPT, f"after{number}", max_new_tokens=12)
        for good in (beside.result(), after.result()):
            assert (good.output, good.logprobs) == (wanted.output, wanted.logprobs)
