"""How soon `millrace view` shows an iteration of 100,000 samples of 2,000 tokens in an object store, and what its server holds.

    python -m benchmarks.viewer [--samples 100000] [--tokens 2000] [--out FILE]

The iteration lies in an object store of its own process, moto's server. It is written to disk piece by piece, and moved there. A fifth of the samples were dropped. What is timed is a process that opens
the run, answers for the iteration's page, then for a sample and its tokens: first without anything in memory, then once more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil
import pyarrow as pa

from benchmarks.stored_iterations import StubRun
from millrace.connectors.storage.files import FileEntry
from millrace.connectors.storage.iteration_files import record_path
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.parts import write_part
from millrace.connectors.storage.store import Store
from millrace.core.contracts import schema
from millrace.core.contracts.ids import group_id, sample_id
from millrace.flows.viewer.answers import Viewer, as_json

COMMAND = "python -m benchmarks.viewer"
RUN, BUCKET = "large", "bucket"
OF_GROUP = 8  # samples
PIECE = 500  # samples of a row group of the batch, and of a part
DROPPED = 5  # of five groups, one
More = Callable[[Store, Sequence[str]], list[FileEntry]]


def main() -> None:
    """Write the run, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--measure", metavar="ROOT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder, store(folder) as root:
        write(f"{folder}/runs", options.samples, options.tokens)
        size = upload(f"{folder}/runs")
        command = [sys.executable, "-m", "benchmarks.viewer", "--measure", root]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = {
        "samples": options.samples,
        "tokens": options.tokens,
        "stored_gib": size / 2**30,
        **json.loads(done.stdout),
    }
    print(
        f"{options.samples:,} samples of {options.tokens:,} tokens, {found['stored_gib']:.1f} GiB: the iteration after "
        f"{found['open_s']:.2f} s ({found['open_cpu_s']:.2f} s of CPU), a sample after {found['sample_s']:.2f} s "
        f"({found['sample_cpu_s']:.2f}), again after {found['again_s']:.2f} s, a dropped group after {found['dropped_s']:.2f} s; {found['memory_mib']:.0f} MiB at most"
    )
    if options.out:
        options.out.write_text(json.dumps({"command": COMMAND, **found}, indent=1) + "\n")


@contextlib.contextmanager
def store(folder: str) -> Iterator[str]:
    """An object store that keeps objects below a folder; its variables in the environment, and the storage root of the run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.object_store", "--port", str(port)]
    server = subprocess.Popen(command, env={**os.environ, "TMPDIR": folder})
    try:
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        answering(port)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}/runs"
    finally:
        server.kill()
        server.wait()


def upload(runs: str) -> int:
    """Move a run from a disk to the object store, a file at a time; returns the bytes."""
    client, size = boto3.client("s3"), 0
    for path in sorted(Path(runs).rglob("*")):
        if path.is_file():
            size += path.stat().st_size
            with path.open("rb") as body:
                client.put_object(Bucket=BUCKET, Key=f"runs/{path.relative_to(runs)}", Body=body)
            path.unlink()
    return size


def answering(port: int) -> None:
    """Wait until the object store answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def measure(root: str) -> dict[str, float]:
    """Seconds of the pages, and the memory of this process."""
    started, worked = time.monotonic(), time.process_time()
    viewer = Viewer(root, RUN)
    view = viewer.ask(RUN, "iteration", {"iteration": "1"})
    for answer in (viewer.ask(RUN, "overview", {}), view):
        as_json(answer)
    found = {"open_s": time.monotonic() - started, "open_cpu_s": time.process_time() - worked}
    shown = sample_id(next(row["group_id"] for row in view.groups if row["kept"]), 0)
    for name, sample in (("sample_s", shown), ("again_s", shown)):
        started, worked = time.monotonic(), time.process_time()
        for what in ("sample", "lineage", "tokens"):
            as_json(viewer.ask(RUN, what, {"iteration": "1", "sample": sample}))
        found[name] = time.monotonic() - started
        found[name.replace("_s", "_cpu_s")] = time.process_time() - worked
    lost = next(row["example"] for row in view.verdicts if row["verdict"] == "dropped")
    started = time.monotonic()
    as_json(viewer.ask(RUN, "group", {"iteration": "1", "group": lost}))
    found["dropped_s"] = time.monotonic() - started
    memory = psutil.Process().memory_info()
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    return {**found, "memory_mib": max(memory.rss / 2**20, int(peak) / 1024)}


def write(root: str, samples: int, tokens: int, more: More | None = None) -> None:
    """Write the run, some samples at a time. more: writes further parts of their groups."""
    run = StubRun(root, RUN)
    store = run.folder.iteration(0)
    groups = [group_id(RUN, 0, f"p{number}", number) for number in range(samples // OF_GROUP)]
    kept = [group for number, group in enumerate(groups) if number % DROPPED]
    texts = Texts(tokens)
    entries = [
        store.write_table("prompts.parquet", texts.prompts(groups), "prompts"),
        store.write_table("verdicts.parquet", verdicts(groups), "verdicts"),
        store.write_pieces("batch.parquet", lambda: (texts.batch(some) for some in pieces(kept)), "batch"),
        store.write_json("step.json", {"version": 1, "steps": [{"version": 1, "loss": 0.5}]}),
    ]
    landed: list[FileEntry] = []
    for some in pieces(groups):
        landed += parts(store, texts, some)
        landed += more(store, some) if more else []
    # a manifest names parts by their paths, the records of tasks as they landed
    entries += sorted(landed, key=lambda entry: entry.path)
    for task, kind in (("rollout", "rollouts"), ("reward", "rewards")):
        files = [entry.record() for entry in landed if entry.path.startswith(kind)]
        run.keep(store, 0, task, {"files": files})
        entries.append(store.entry(record_path(task)))
    figures = {"reward/mean": 0.5, "train/version": 1.0, "tokens/generated": float(samples * tokens)}
    manifest = Manifest(iteration=0, files=entries, tasks={"trained_version": 1, "metrics": figures})
    run.folder.commit_manifest(0, manifest)


def parts(store: Store, texts: Texts, groups: Sequence[str]) -> list[FileEntry]:
    """The parts of some groups' samples."""
    return [
        write_part(store, "rollouts", texts.rollouts(groups), "rollouts"),
        write_part(store, "rewards", texts.rewards(groups), "rewards"),
    ]


def pieces(groups: Sequence[str]) -> Iterator[Sequence[str]]:
    """Groups of PIECE samples."""
    each = PIECE // OF_GROUP
    for start in range(0, len(groups), each):
        yield groups[start : start + each]


def verdicts(groups: Sequence[str]) -> pa.Table:
    """Of five groups, one was dropped."""
    names, each = ids(groups)
    dropped = np.repeat(np.arange(len(groups)) % DROPPED == 0, OF_GROUP)
    return filled(
        "verdicts",
        len(names),
        sample_id=names,
        group_id=each,
        prompt_id=each,
        verdict=np.where(dropped, "dropped", "kept"),
        reason=["zero variance" if lost else None for lost in dropped],
        dropped_by=["zero_variance" if lost else None for lost in dropped],
        train_step=[None if lost else 1 for lost in dropped],
    )


def ids(groups: Sequence[str]) -> tuple[list[str], list[str]]:
    """The samples of groups, and the group of each."""
    names = [sample_id(group, index) for group in groups for index in range(OF_GROUP)]
    return names, [group for group in groups for _ in range(OF_GROUP)]


class Texts:
    """Made-up samples of a length. Their tokens are the same in each piece, and as hard to compress as real ones."""

    def __init__(self, tokens: int) -> None:
        random = np.random.default_rng(0)
        self._tokens, self._size = tokens, PIECE // OF_GROUP * OF_GROUP
        ids_of = random.zipf(1.3, self._size * (tokens + 100)) % 150_000
        self._ids = ids_of.astype(np.int32)
        self._logprobs = -random.exponential(0.5, self._size * tokens).astype(np.float32)
        words = np.array([f"word{number} " for number in range(5000)])
        self._said = ["".join(words[random.zipf(1.3, tokens) % 5000]) for _ in range(self._size)]
        self._rewards = random.random(self._size).round(2)

    def prompts(self, groups: Sequence[str]) -> pa.Table:
        """The drawn groups."""
        numbers = list(range(len(groups)))
        return filled(
            "prompts",
            len(groups),
            group_id=list(groups),
            prompt_id=list(groups),
            source=["sums"] * len(groups),
            row=numbers,
            ordinal=numbers,
            prompt=['"How many?"'] * len(groups),
        )

    def rollouts(self, groups: Sequence[str], kind: str = "rollouts", **more: Any) -> pa.Table:
        """The samples of at most PIECE samples' groups."""
        names, each = ids(groups)
        count = len(names)
        lengths = np.full(count, self._tokens)
        return filled(
            kind,
            count,
            sample_id=names,
            group_id=each,
            prompt_id=each,
            source=["sums"] * count,
            index=[number % OF_GROUP for number in range(count)],
            prompt=['"How many?"'] * count,
            tokens=lists(self._ids, lengths + 100),
            response_length=lengths,
            response=self._said[:count],
            loss_mask=lists(np.ones(self._tokens * count, np.int8), lengths),
            rollout_logprobs=lists(self._logprobs, lengths),
            policy_versions=[[{"first_token": 0, "version": 0}]] * count,
            engine_id=["engine-0"] * count,
            status=["completed"] * count,
            **more,
        )

    def rewards(self, groups: Sequence[str]) -> pa.Table:
        """Their scores."""
        names, each = ids(groups)
        scores = self._rewards[: len(names)]
        return filled(
            "rewards",
            len(names),
            sample_id=names,
            group_id=each,
            reward=scores,
            scoring=["scored"] * len(names),
        )

    def batch(self, groups: Sequence[str]) -> pa.Table:
        """The rows of a batch."""
        count = len(groups) * OF_GROUP
        scores = self._rewards[:count]
        more = {"reward": scores, "advantage": scores - 0.5, "train_step": [1] * count}
        return self.rollouts(groups, "batch", **more, scoring=["scored"] * count, verdict=["kept"] * count)


def lists(values: Any, lengths: Any) -> pa.Array:
    """Lists of these lengths, one after the other."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[: offsets[-1]]))


def filled(kind: str, count: int, **columns: Any) -> pa.Table:
    """A table of a kind; columns that are not given are empty, or null where they may be."""
    arrays = []
    for field in schema.SCHEMAS[kind]:
        if field.name in columns:
            values = columns[field.name]
            arrays.append(values if isinstance(values, pa.Array) else pa.array(values, field.type))
        elif field.nullable:
            arrays.append(pa.nulls(count, field.type))
        else:
            arrays.append(pa.array([empty(field.type)] * count, field.type))
    return pa.table(arrays, names=schema.SCHEMAS[kind].names)


def empty(kind: pa.DataType) -> Any:
    """The empty value of a type."""
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return []
    return "" if pa.types.is_string(kind) else 0


if __name__ == "__main__":
    main()
