"""A second trainer, in numpy: ranks that hold to the contract of connectors/trainers/rank.py, and train in a whole run.

Its model is the configured one without layers: what comes after a token follows from that token alone, by its embedding, normed,
and the output matrix. Plain gradient descent trains the output matrix. Every rank holds all of it and computes the same; rank 0
writes files. Name it in a configuration: `trainer.kind=tests.support.bigram_rank:BigramRank`.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.storage.files import recorded
from millrace.connectors.storage.store import Store, split_url
from millrace.connectors.trainers.rank import HeldOutSample, RankState, SaveState
from millrace.core.config import RunConfig
from millrace.core.contracts.handles import BroadcastGroup
from millrace.core.contracts.task_records import FileRecord, StepMetrics, StepRequest
from millrace.core.contracts.weight_bucket import TensorEntry, WeightBucket
from millrace.core.errors import RefusedStepError, StorageError, TrainerError
from millrace.core.families.served_files import ALONE, Served, write_side_files
from millrace.core.replay import numbers_of, settings_again, settings_of

HEAD, COMPLETE = "lm_head.weight", "complete.json"
SWITCHED_OFF = ("o_proj.weight", "down_proj.weight")  # without their output a layer adds nothing
Floats = NDArray[np.float32]


class BigramRank:
    """One process of the trainer, as a Rank."""

    def __init__(self, config: Mapping[str, Any], rank: int, world_size: int) -> None:
        self.config = RunConfig.model_validate(config)
        self.rank, self.version, self.last = rank, cast(int | None, None), cast(StepMetrics | None, None)
        self._trained_on: str | None = None
        self._chunks = (0, 0)  # version of the step, and chunks of it that were announced
        self._saving: tuple[SaveState, bytes, StepMetrics | None] | None = None
        self._left: list[tuple[str, Floats]] = []
        self._flat = b""
        self._group: Any = None

    def state(self) -> RankState:
        saving = self._saving[0] if self._saving else None
        return {
            "rank": self.rank,
            "version": self.version,
            "busy": None,
            "pid": os.getpid(),
            "saving": saving,
        }

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def prepare(self) -> None: ...

    def setup(self, master: tuple[str, int]) -> RankState:
        folder = Path(self.config.model.path)
        self.tensors: dict[str, Floats] = load_file(folder / "model.safetensors")
        for name, tensor in self.tensors.items():
            tensor *= not name.endswith(SWITCHED_OFF)
        embedding = self.tensors["model.embed_tokens.weight"]
        eps = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
        size = np.sqrt((embedding**2).mean(-1, keepdims=True) + eps)
        self.hidden: Floats = embedding / size * self.tensors["model.norm.weight"]
        self.version, self.settings = 0, settings_of(self.config, {"device": "cpu", "deterministic": True})
        return self.state()

    def train(self, step: StepRequest) -> StepMetrics:
        if step.version == self.version and self.last is not None:
            if step.batch_sha256 != self._trained_on and None not in (step.batch_sha256, self._trained_on):
                raise TrainerError(f"weight version {self.version} was made of another batch")
            return self.last
        self._check(step.version - 1)
        started, (store, name) = time.perf_counter(), split_url(step.batch_url)
        table = store.read_table(name, "batch", sha256=step.batch_sha256).to_pylist()
        rows = [row for row in table if row["train_step"] == step.version]
        count = sum(sum(row["loss_mask"]) for row in rows)
        if not count:
            raise RefusedStepError(f"step {step.version}: no sample has a token to train on")
        loss, gaps, gradient = 0.0, [0.0], np.zeros_like(self.tensors[HEAD])
        for row in rows:
            tokens, mask = row["tokens"], np.array(row["loss_mask"], bool)
            before, after = (np.array(tokens[-len(mask) - 1 + i : len(tokens) - 1 + i])[mask] for i in (0, 1))
            logprobs = self._logprobs(before)
            chosen, weight = logprobs[np.arange(len(after)), after], row["advantage"] / count
            loss -= weight * float(chosen.sum())
            gaps += list(abs(chosen - np.array(row["rollout_logprobs"])[mask]))
            slope = np.exp(logprobs)
            slope[np.arange(len(after)), after] -= 1
            gradient += weight * slope.T @ self.hidden[before]
        norm = float(np.linalg.norm(gradient))
        if not np.isfinite([loss, norm]).all():
            raise RefusedStepError(f"step {step.version}: the loss is {loss}, the gradient norm {norm}")
        lr = numbers_of(step.recorded)["lr"] if step.recorded else self.config.trainer.optimizer.lr
        self.tensors[HEAD] -= np.float32(lr) * gradient
        seconds, tokens = time.perf_counter() - started, sum(len(row["tokens"]) for row in rows)
        self.version, self._trained_on = step.version, step.batch_sha256
        self.last = StepMetrics(
            version=step.version,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            logprob_gap_mean=float(np.mean(gaps)),
            logprob_gap_max=float(max(gaps)),
            samples=len(rows),
            tokens=tokens,
            packs=[tokens],
            seconds={"reload": 0.0, "prepare": 0.0, "compute": seconds, "apply": 0.0},
            tokens_per_second=tokens / seconds,
            settings=settings_again(step.recorded, self.settings),
        )
        return self.last

    def pass_chunk(self, version: int, number: int, url: str, sha256: str) -> int:
        self._check(version - 1)
        held = self._chunks[1] if self._chunks[0] == version else 0
        self._chunks = version, held + (number == held)
        return self._chunks[1]

    def losses(self, version: int, samples: Sequence[HeldOutSample]) -> list[float]:
        self._check(version)
        found = []
        for tokens, mask, _ in samples:
            logprobs = self._logprobs(np.array(tokens[-len(mask) - 1 : -1]))
            chosen = logprobs[np.arange(len(mask)), tokens[-len(mask) :]]
            found.append(-float(chosen @ np.array(mask)))
        return found

    def _logprobs(self, before: NDArray[Any]) -> Floats:
        logits = self.hidden[before] @ self.tensors[HEAD].T
        logits -= logits.max(-1, keepdims=True)
        return cast(Floats, logits - np.log(np.exp(logits).sum(-1, keepdims=True)))

    def save(self, url: str) -> None:
        self.begin_save(url)
        self.commit_save()

    def begin_save(self, url: str) -> None:
        assert self.version is not None
        np.save(data := io.BytesIO(), self.tensors[HEAD])
        state = SaveState(url=url, version=self.version, state="written", reason=None)
        self._saving = state, data.getvalue(), self.last

    def commit_save(self) -> float:
        assert self._saving is not None
        started, (state, data, last), self._saving = time.perf_counter(), self._saving, None
        store = Store(state["url"])
        if self.rank == 0 and store.exists(COMPLETE):
            if store.read_sealed(COMPLETE)["version"] != state["version"]:
                raise StorageError("holds a complete checkpoint of another weight version", where=store.url)
        elif self.rank == 0:
            files = [store.write("head.npy", data).model_dump(include={"path", "size", "sha256"})]
            store.write_sealed(COMPLETE, {"version": state["version"], "last": last, "files": files})
        return time.perf_counter() - started

    def drop_save(self) -> None:
        self._saving = None

    def load(self, url: str) -> int:
        store = Store(url)
        marker = store.read_sealed(COMPLETE)
        (file,) = recorded(marker["files"], store.url_of(COMPLETE))
        self.tensors[HEAD] = np.load(io.BytesIO(store.read_named(file.path, file)))
        self.last, self._trained_on, version = marker["last"], None, int(marker["version"])
        self.version = version
        return version

    def export(self, directory: str, version: int, merged: bool = False) -> None:
        self._check(version)
        if self.rank == 0:
            aside = Path(f"{directory}.aside")
            self._write(aside, ALONE)
            aside.rename(directory)

    def upload(
        self, url: str, version: int, served: Served = ALONE, merged: bool = False
    ) -> list[FileRecord]:
        self._check(version)
        if self.rank:
            return []
        with temporary_folder("millrace-export") as folder:
            self._write(Path(folder), served)
            return [entry.record() for entry in Store(url).upload_dir(folder, "")]

    def _write(self, folder: Path, served: Served) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_side_files(folder, self.config.model.path, served)

    def bucket(self, version: int, number: int, size: int, share: bool) -> WeightBucket:
        self._check(version)
        self._left = self._left if number else sorted(self.tensors.items())
        taken, entries, at = list[Floats](), list[TensorEntry](), 0
        while self._left and (not taken or at + self._left[0][1].nbytes <= size):
            name, tensor = self._left.pop(0)
            entries.append(TensorEntry(name, tensor.shape, "float32", at, at := at + tensor.nbytes))
            taken.append(tensor)
        self._flat = b"".join(tensor.tobytes() for tensor in taken)
        return WeightBucket(entries, at, not self._left, b"")

    def end_buckets(self) -> None:
        self._left, self._flat = [], b""

    def broadcast_group(self) -> BroadcastGroup | None:
        return cast(BroadcastGroup, self._group.description) if self._group else None

    def open_broadcast(self, name: str, members: list[str], loopback: bool) -> BroadcastGroup:
        from millrace.connectors.trainers.weights.engine_group import EngineGroup

        self.close_broadcast()
        self._group = EngineGroup(name, members, loopback=loopback, gpu=False)
        return cast(BroadcastGroup, self._group.description)

    def enter_broadcast(self, size: int) -> None:
        self._group.enter(size)

    def broadcast_bucket(self, timeout_s: float) -> None:
        import torch

        self._group.send(torch.frombuffer(bytearray(self._flat), dtype=torch.uint8), timeout_s)

    def close_broadcast(self) -> None:
        if self._group:
            self._group.close()
        self._group = None

    def offload(self) -> int:
        return 0

    def reload(self) -> None: ...

    def _check(self, version: int) -> None:
        if version != self.version:
            raise TrainerError(f"rank {self.rank} holds weight version {self.version}, not {version}")
