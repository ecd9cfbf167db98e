"""Tokens that a run loses when its driver dies: what its engines had generated of unfinished answers, less what is stored.

Reads what engines hold, and the run's folder. Knows nothing of modes or of figures.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any, Protocol

import psutil

from millrace.connectors.engines.embedded.access import KEY
from millrace.connectors.host.local_files import log_folder
from millrace.connectors.storage.parts import list_parts, read_parts
from millrace.connectors.storage.run_folder import CUT, DEFERRED, RunFolder
from millrace.connectors.storage.store import Store

EMBEDDED = "millrace.connectors.engines.embedded"
DECODED = re.compile(r"Decode batch.*?#running-req:\s*(\d+).*?#token:\s*(\d+)")  # a line of SGLang's log
LOGGED_S = 1.0  # SGLang writes one after 40 steps
POLL_S = 0.1
ASKED_S = 10.0


class Engines(Protocol):
    """The engines of a run."""

    def held(self) -> tuple[int, int]:
        """Requests that are answered now, and the tokens that they have, those of their prompts among them."""
        ...


class EmbeddedEngines:
    """Embedded engines that serve one model folder, on this machine. They tell what they hold whoever has their key."""

    def __init__(self, model: Path) -> None:
        self._addresses = [
            _address(process)
            for process in psutil.process_iter(["cmdline"])
            if {EMBEDDED, str(model)} <= set(process.info["cmdline"] or ())
        ]
        assert self._addresses, f"no engine serves {model}"

    def held(self) -> tuple[int, int]:
        """As they tell."""
        loads = [load for address in self._addresses for load in _loads(*address)]
        return sum(one["num_running_reqs"] for one in loads), sum(one["num_used_tokens"] for one in loads)


class SGLangEngines:
    """Engines of a run by their logs: no one else has SGLang's key."""

    def __init__(self, root: str, run: str) -> None:
        self._logs = sorted(log_folder(root, run).glob("engine-*.log"))
        assert self._logs, f"no logs of engines in {log_folder(root, run)}"

    def held(self) -> tuple[int, int]:
        """As the newest lines say of those that wrote one meanwhile."""
        ends = [log.stat().st_size for log in self._logs]
        time.sleep(LOGGED_S)
        found = [DECODED.findall(_rest(log, end)) for log, end in zip(self._logs, ends, strict=True)]
        newest = [(int(requests), int(tokens)) for lines in found if lines for requests, tokens in lines[-1:]]
        return sum(requests for requests, _ in newest), sum(tokens for _, tokens in newest)


def kill_within_rollout(process: Any, engines: Engines, after_s: float) -> tuple[int, int]:
    """Kill the driver so long after requests run again, and return what engines held at that moment."""
    held = held_after(engines, after_s)
    process.kill()
    process.wait()
    return held


def held_after(engines: Engines, after_s: float) -> tuple[int, int]:
    """What engines hold so long after requests run again."""
    _running(engines)
    time.sleep(after_s)
    return _running(engines)


def lost(run: RunFolder, first_open: int, last_open: int, held: tuple[int, int]) -> dict[str, int]:
    """Tokens of unfinished answers that engines had, those of them that are stored, and the rest."""
    stored = sum(_unfinished(run, index) for index in range(first_open, last_open + 1))
    requests, tokens = held
    return {"requests": requests, "tokens": tokens, "stored": stored, "lost": max(0, tokens - stored)}


def _running(engines: Engines) -> tuple[int, int]:
    """What engines hold, once they answer anything."""
    while not (held := engines.held())[0]:
        time.sleep(POLL_S)
    return held


def _unfinished(run: RunFolder, index: int) -> int:
    """Tokens that are stored of an open iteration's unfinished samples: its segments, and what was carried to it."""
    folder, before = run.iteration(index), run.iteration(index - 1)
    if folder.exists(CUT):  # they were carried to the next
        return 0
    finished = _column(folder, "rollouts", "sample_id") if list_parts(folder, "rollouts") else set()
    tokens = 0
    if before.exists(DEFERRED):
        rows = before.read_table(DEFERRED, "rollouts", columns=["sample_id", "status", "response_length"])
        carried = [row for row in rows.to_pylist() if row["status"] == "aborted"]
        tokens += sum(row["response_length"] for row in carried if row["sample_id"] not in finished)
    if list_parts(folder, "turns"):
        turns = read_parts(folder, "turns", "turns", columns=["rollout_id", "output_ids"])
        segments = zip(turns["rollout_id"].to_pylist(), turns["output_ids"].to_pylist(), strict=True)
        tokens += sum(len(ids) for sample, ids in segments if sample not in finished)
    return tokens


def _column(folder: Store, kind: str, name: str) -> set[Any]:
    return set(read_parts(folder, kind, kind, columns=[name])[name].to_pylist())


def _rest(log: Path, start: int) -> str:
    with log.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace")


def _address(process: psutil.Process) -> tuple[str, str]:
    """Where an engine listens, and its key."""
    listening = [one for one in process.net_connections() if one.status == psutil.CONN_LISTEN]
    return f"http://127.0.0.1:{listening[0].laddr.port}/v1/loads", process.environ().get(KEY, "")


def _loads(url: str, key: str) -> list[dict[str, int]]:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=ASKED_S) as answer:
        loads: list[dict[str, int]] = json.load(answer)["loads"]
    return loads
