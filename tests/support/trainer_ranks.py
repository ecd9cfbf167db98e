"""Trainer ranks in processes of their own, as in production; the processes serve one layout after another."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.core.config import RunConfig
from millrace.core.contracts import schema
from millrace.core.contracts.task_records import StepRequest
from millrace.core.logprob_gap import LogprobGuard

VOCAB = 97
CLIP_GRAD = 0.5
OF_FSDP = {
    "replicate"
}  # fields of a layout that megatron-core's trainer refuses: tests/connectors/fsdp/test_replicas.py
PATIENCE_S = 90.0
FORKS = get_context(
    "forkserver"
)  # torch and megatron are imported once, in the process that ranks are forked from
FORKS.set_forkserver_preload(["tests.support.rank_imports"])
# gloo's threads of a layout outlive it, for DDP's gradient hooks keep its groups: some twenty, which wake a hundred times a second
LAYOUTS_A_PROCESS = 4


def configuration(model: str | Path, world: int = 1, **changes: Any) -> dict[str, Any]:
    """A run of 3 steps on 8 samples each; `changes` are laid over trainer and algorithm."""
    parallel = changes.pop("parallel", {})
    optimizer = {"lr": 1e-3, "weight_decay": 0.01, "clip_grad": CLIP_GRAD, **changes.pop("optimizer", {})}
    algorithm = changes.pop("algorithm", {})
    seed = changes.pop("seed", 0)
    dtype = changes.pop("dtype", "float32")
    config = RunConfig.model_validate(
        {
            "run": {"name": "a", "seed": seed, "iterations": 3},
            "model": {"path": str(model), "dtype": dtype},
            "data": {"sources": [{"path": "p"}]},
            "rollout": {"prompts": 2, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 16}},
            "trainer": {
                "world_size": world,
                "parallel": parallel,
                "max_pack_tokens": 48,
                "logprob_chunk_tokens": 16,
                "threads": 1,
                "device": "cpu",
                "optimizer": optimizer,
                **changes,
            },
            "algorithm": algorithm,
        }
    )
    return config.model_dump(mode="json")


def samples(
    step: int, count: int = 8, seed: int = 0, logprob: float = -4.6, longest: int = 12
) -> list[dict[str, Any]]:
    """Rows of one step of a batch: random tokens, advantages and masks."""
    draw = random.Random(f"{seed}/{step}")
    rows = []
    for i in range(count):
        prompt, response = draw.randint(2, 6), draw.randint(1, longest)
        mask = [1] * response
        if response > 4 and i % 3 == 0:
            mask[1] = mask[2] = 0
        rows.append(
            {
                "sample_id": f"s{step}-{i}",
                "group_id": f"g{step}-{i // 4}",
                "prompt_id": "p",
                "iteration": 0,
                "source": "a",
                "index": i % 4,
                "prompt": '"x"',
                "label": None,
                "metadata": None,
                "tokens": [draw.randrange(VOCAB) for _ in range(prompt + response)],
                "response_length": response,
                "response": "",
                "loss_mask": mask,
                "rollout_logprobs": [logprob] * response,
                "policy_versions": [],
                "engine_id": "",
                "seed": 0,
                "turns": 1,
                "status": "completed",
                "reason": None,
                "timings": [],
                "reward": 1.0,
                "reward_parts": [],
                "scoring": "scored",
                "verdict": "kept",
                "advantage": draw.uniform(-1, 1),
                "train_step": step,
            }
        )
    return rows


def write_batch(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    """URL of a batch with these rows."""
    from millrace.connectors.storage.store import Store

    table = pa.Table.from_pylist(list(rows), schema=schema.schema("batch"))
    Store(str(folder)).write_table("batch.parquet", table, "batch")
    return f"{folder}/batch.parquet"


def write_batches(folder: Path, steps: int) -> str:
    """Batches of one step each, in as many files: a template of URLs by step."""
    for step in range(1, steps + 1):
        write_batch(folder / str(step), samples(step))
    return str(folder / "{}" / "batch.parquet")


def folders_of(save: Callable[..., Path], new_folder: Callable[[str], Path]) -> Callable[..., Path]:
    """A function that has `save` write a model of a kind and its changes, once for the same arguments, and returns its folder."""
    made: dict[str, Path] = {}

    def make(kind: str = "qwen3", **changes: Any) -> Path:
        key = f"{kind}/{sorted(changes.items())}"
        if key not in made:
            made[key] = save(new_folder(kind), kind, **changes)
        return made[key]

    return make


def log_probabilities(rank: Any, batch_url: str) -> dict[str, list[float]]:
    """Log-probabilities of every sample's response tokens under a rank's weights; from rank 0, {} elsewhere."""
    import torch.distributed as dist

    from millrace.connectors.trainers.packing import make_packs

    learner = rank.learner
    with rank._working("score"):
        packs = make_packs(
            rank._read(batch_url), rank.config, learner.architecture, rank.device, learner.place
        )
        values = learner.passes.logprobs(packs)
    scored: dict[str, list[float]] = {}
    if values is not None:
        rows = [row for pack in packs for row in pack.rows]
        parts = values.cpu().split([row.response_length for row in rows])
        scored = {row.sample_id: part.tolist() for row, part in zip(rows, parts, strict=True)}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, scored)
    return {name: value for part in everywhere for name, value in part.items()} if rank.rank == 0 else {}


class RankFailedError(Exception):
    """A rank's call raised; the message carries its type and text."""


class Group:
    """The ranks of one layout."""

    def __init__(self, workers: Workers, world: int) -> None:
        self._workers = workers
        self.world = world

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The method's result of every rank. Raises RankFailedError with the first rank's error."""
        return self._workers.ask(self.world, ("call", method, args, kwargs))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank object, *args) on every rank."""
        return self._workers.ask(self.world, ("run", function, args, {}))

    def train(self, versions: Sequence[int], url: str, guard: float | None = None) -> list[dict[str, Any]]:
        """Rank 0's metrics of several steps."""
        held = None if guard is None else LogprobGuard(guard)
        return [self.step(version, url, held)[0] for version in versions]

    def step(self, *asked: Any) -> list[dict[str, Any]]:
        """Every rank's metrics of a step. asked: as StepRequest takes it."""
        return self.call("train", StepRequest(*asked))


class Workers:
    """Processes that hold one rank each, started when a layout first needs them."""

    patience_s = PATIENCE_S
    layouts_a_process = LAYOUTS_A_PROCESS

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._layouts = 0  # that the processes have served

    @contextmanager
    def group(self, config: dict[str, Any]) -> Iterator[Group]:
        """Ranks as the configuration names them, holding version 0."""
        world = config["trainer"]["world_size"]
        self._ensure(world)
        try:
            (master,) = self.ask(1, ("address", config, (world,), {}))
            self.ask(world, ("setup", config, (world, master), {}))
            yield Group(self, world)
        except BaseException:
            self.close()  # the next group starts from new processes
            raise
        if self._processes:
            self.ask(world, ("shutdown", None, (), {}))
            self._layouts += 1
            if self._layouts == self.layouts_a_process:
                self.close()

    def ask(self, world: int, message: Any) -> list[Any]:
        pipes = self._pipes[:world]
        for pipe in pipes:
            pipe.send(message)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.patience_s
        while len(answers) < world:
            missing = [pipe for number, pipe in enumerate(pipes) if number not in answers]
            for pipe in wait(missing, timeout=1.0):
                try:
                    answers[pipes.index(pipe)] = pipe.recv()
                except EOFError:
                    answers[pipes.index(pipe)] = (False, "the process died")
            failed = [text for good, text in answers.values() if not good]
            if failed and len(answers) < world:
                deadline = min(deadline, time.monotonic() + 10)  # the others may wait for the failed one
            if time.monotonic() > deadline:
                self.close()
                raise RankFailedError(f"ranks {sorted(answers)} of {world} answered: {failed}")
        for number in range(world):
            good, value = answers[number]
            if not good:
                raise RankFailedError(value)
        return [answers[number][1] for number in range(world)]

    def _ensure(self, world: int) -> None:
        for number in range(len(self._processes), world):
            here, there = FORKS.Pipe()
            process = self._start(there, number)
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _start(self, pipe: Any, number: int) -> Any:
        process = FORKS.Process(target=_serve, args=(pipe, number), daemon=True)
        process.start()
        return process

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._layouts = [], [], 0


class GpuWorkers(Workers):
    """The same, each with a GPU: processes that were forked could not use one."""

    patience_s = 240.0  # kernels are compiled at first
    layouts_a_process = 100

    def _start(self, pipe: Any, number: int) -> Any:
        gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        process = get_context("spawn").Process(target=_serve, args=(pipe, number), daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", gpus[number] if len(gpus) > number else str(number))
            process.start()
        return process


def _serve(pipe: Any, number: int) -> None:
    import tests.support.rank_imports  # noqa: F401 done already, where this process was forked
    from millrace.connectors.trainers.chosen import make_rank
    from millrace.connectors.trainers.learner_rank import LearnerRank

    rank: Any = None
    while True:
        try:
            kind, what, args, kwargs = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            value: Any = None
            if kind == "address":
                rank = make_rank(what, number, *args)
                value = rank.address()
            elif kind == "setup":
                rank = rank or make_rank(what, number, args[0])
                value = rank.setup(args[1])
            elif kind == "call":
                value = getattr(rank, what)(*args, **kwargs)
            elif kind == "run":
                value = what(rank, *args)
            else:
                if isinstance(rank, LearnerRank):
                    rank.shutdown()
                rank = None
            pipe.send((True, value))
        except Exception as error:  # noqa: BLE001 the parent raises it
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))
