"""Everything a configuration names, touched once before anything starts.

Owns the order of the check and what runs at the same time; imports no torch, ray, prefect, mlflow or transformers, and
calls nothing of the user's but what importing his modules calls.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec

from millrace.connectors.sglang.launch import ROUTER_MISSING
from millrace.connectors.sglang.server_args import sglang_finds
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig, rules
from millrace.core.config.plan import visible_gpus
from millrace.core.config.problems import Problem
from millrace.core.errors import StorageError
from millrace.core.resource_layout import seats
from millrace.flows.preflight.check_data import Rows, check_rows, sources
from millrace.flows.preflight.check_hooks import check_hooks, check_passthrough
from millrace.flows.preflight.check_model import Checkpoint, check_model
from millrace.flows.preflight.plan_table import render as render

PATIENCE_S = 5.0  # for a storage that takes the connection and then says nothing
CONNECT_S = 1.0

TRANSFERS = {  # what SGLang imports to move KV caches, and what has it
    "mooncake": ("mooncake", "mooncake-transfer-engine"),
    "mooncake_tcp": ("mooncake", "mooncake-transfer-engine"),
    "nixl": ("nixl", "nixl"),
}

Touch = Callable[[], list[Problem]]


def check(config: RunConfig, prepared: bool = False) -> list[Problem]:
    """Everything wrong with a configuration, all at once.

    prepared: run.prepare was called already, so that files it should have made are missing where they are not there;
    before that, a missing file is none of ours.
    """
    may_be_made = config.run.prepare is not None and not prepared
    found = rules.problems(config)
    named = {problem.field for problem in found}
    data = [rows for rows in sources(config) if f"{rows.field}.path" not in named]
    if may_be_made:
        data = [rows for rows in data if not _absent(rows.source.path)]
    touches: dict[str, Touch] = {
        f"{rows.field}.path": _reading(rows)
        for rows in data
        if _known(f"{rows.field}.path", rows.source.path, found)
    }
    if "storage.root" not in named and _known("storage.root", config.storage.root, found):
        touches["storage.root"] = lambda: _writable("storage.root", config.storage.root)
    weights = config.sync.directory or ""
    if config.sync.by_url and "sync.directory" not in named and _known("sync.directory", weights, found):
        touches["sync.directory"] = lambda: _writable("sync.directory", weights)
    if config.placement.ray_address:
        touches["placement.ray_address"] = lambda: list(_reachable(config.placement.ray_address or ""))
    running = _Touches(touches)
    model = Checkpoint()
    found += check_model(config, may_be_made, model)
    found += check_hooks(config)
    found += check_passthrough(config)
    found += _machine(config)
    found += running.problems()
    for rows in data:
        found += [problem for problem in check_rows(config, rows, model) if problem not in found]
    return found


class _Touches:
    """Touches that wait for files and servers, all at once, each in a thread that nobody waits for beyond PATIENCE_S."""

    def __init__(self, touches: dict[str, Touch]) -> None:
        self._found: dict[str, list[Problem]] = {}
        self._threads = {
            field: threading.Thread(target=self._run, args=(field, touch), daemon=True)
            for field, touch in touches.items()
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, field: str, touch: Touch) -> None:
        self._found[field] = touch()

    def problems(self) -> list[Problem]:
        """What they found."""
        for thread in self._threads.values():
            thread.join(PATIENCE_S)
        silent = Problem(
            "", None, f"no answer within {PATIENCE_S:g} s", "see that the server runs and try again"
        )
        return [
            problem
            for field in self._threads
            for problem in self._found.get(field, [silent._replace(field=field)])
        ]


def _reading(rows: Rows) -> Touch:
    return rows.read


def _absent(path: str) -> bool:
    return "://" not in path and not Path(path).exists()


def _known(field: str, url: str, found: list[Problem]) -> bool:
    """Whether fsspec can reach URLs of this kind; adds the problem if it cannot."""
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        found.append(Problem(field, url, f"{protocol}:// is no known storage", "give a path, s3:// or gs://"))
    except ImportError as error:
        found.append(Problem(field, url, f"{protocol}:// needs a package: {error}", "install it"))
    else:
        return True
    return False


def _writable(field: str, root: str) -> list[Problem]:
    try:
        Store(root).check_writable(field)
    except StorageError as error:
        return [Problem(field, root, error.reason, error.remedy or "correct the path")]
    return []


def _reachable(address: str) -> Iterator[Problem]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local"):
        return
    if not host or not port.isdigit():
        yield Problem("placement.ray_address", address, "it has no host:port", "write it as 10.0.0.1:6379")
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        yield Problem(
            "placement.ray_address",
            address,
            f"no Ray head answers there: {error}",
            "start it or correct the address",
        )


def _machine(config: RunConfig) -> Iterator[Problem]:
    """What this host must have when the run lives on it."""
    here, gpus = config.placement.ray_address is None, visible_gpus()
    if here and config.trainer.device == "cuda" and not gpus:
        yield Problem("trainer.device", "cuda", "this host has no NVIDIA GPU", "set it to auto or cpu")
    if here and config.placement.colocate and config.trainer.device == "auto" and not gpus:
        yield Problem("placement.colocate", True, "this host has no NVIDIA GPU to share", "set it to false")
    needed = seats(config, gpus=True).needed["GPU"]
    if here and 0 < gpus < needed:
        yield Problem(
            "trainer.world_size",
            config.trainer.world_size,
            f"trainer and engines need {needed:g} GPUs, and this host shows {gpus}",
            "lower it, engines.count or engines.gpus, set placement.colocate=true, or join a cluster by placement.ray_address",
        )
    if here and config.engines.prefill and config.engines.kind != "external" and not gpus:
        yield Problem(
            "engines.prefill",
            config.engines.prefill,
            "without a GPU engines are embedded ones, which do both",
            "set it to 0",
        )
    if here and config.engines.kind == "sglang" and not sglang_finds("sglang"):
        yield Problem(
            "engines.kind",
            "sglang",
            "SGLang is not installed",
            "install it, or set engines.kind to auto or embedded",
        )
    if here and config.engines.router and not importlib.util.find_spec("sglang_router"):
        yield Problem("engines.router", config.engines.router.policy, *ROUTER_MISSING)
    if here and config.engines.prefill and config.engines.kind == "sglang":
        yield from _transfers(config.engines.sglang.get("disaggregation_transfer_backend", "mooncake"))
    algorithm = str(config.engines.sglang.get("speculative_algorithm") or "NGRAM")
    if here and gpus and algorithm.upper() != "NGRAM" and not sglang_finds("deep_gemm"):
        yield Problem(
            "engines.sglang.speculative_algorithm",
            algorithm,
            "SGLang imports deep_gemm when it starts with a draft model, and does not find it",
            "install sgl-deep-gemm where SGLang is, or set it to NGRAM",
        )
    for address in config.engines.addresses:
        yield from _engine_answers(address)
    if here:
        yield from _listens(config.engines.host)
    folder = None if config.sync.by_url else config.sync.directory
    if folder and here and not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        yield Problem("sync.directory", folder, "no folder that can be written", "make it, or leave it out")


def _transfers(library: str) -> Iterator[Problem]:
    package, wheel = TRANSFERS.get(library, (None, None))
    if package and not sglang_finds(package):
        yield Problem(
            "engines.sglang.disaggregation_transfer_backend",
            library,
            f"it moves KV caches between engines, and SGLang does not find {package}",
            f"install {wheel} where SGLang is, or name another",
        )


def _engine_answers(address: str) -> Iterator[Problem]:
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/model_info", timeout=10):
            return
    except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
        yield Problem(
            "engines.addresses",
            address,
            f"no engine answers there: {error}",
            "start it, or correct the address",
        )


def _listens(host: str) -> Iterator[Problem]:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError as error:
        yield Problem(
            "engines.host", host, f"no address that this host can listen on: {error}", "use 127.0.0.1"
        )
