"""Checks this host and the addresses in a configuration: GPUs, packages, a Ray head, engines, a port to listen on."""

import contextlib
import errno
import importlib.util
import os
import shutil
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from millrace.connectors.engines.sglang.client import keeps_requests
from millrace.connectors.engines.sglang.launch import ROUTER_MISSING
from millrace.connectors.engines.sglang.server_args import UNTOLD, server_args, sglang_finds
from millrace.connectors.host.local_files import home
from millrace.connectors.ray import head
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.engine_kinds import SGLANG
from millrace.core.config.engines import ExternalEngines
from millrace.core.config.parts.problems import Problem
from millrace.core.config.plan import (
    host_memory,
    layout_of,
    numbers_of,
    size_text,
    visible_gpus,
    weights_on_disk,
)
from millrace.core.config.plan.layout import resource_layout
from millrace.core.contracts.references import resolved
from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.architecture import Architecture
from millrace.core.families.registry import family_named

CONNECT_S = 1.0

TRANSFERS = {  # the package that SGLang imports to move KV caches, and its wheel
    "mooncake": ("mooncake", "mooncake-transfer-engine"),
    "mooncake_tcp": ("mooncake", "mooncake-transfer-engine"),
    "nixl": ("nixl", "nixl"),
}


def ray_answers(address: str) -> Iterator[Problem]:
    """A problem unless a Ray head listens at the address."""
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
            "start it, or correct the address",
        )


def tracking_answers(uri: str) -> Iterator[Problem]:
    """A problem unless something listens at the host and port of an MLflow server's URI; other URIs name files."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
    except OSError as error:
        yield Problem(
            "tracking.uri",
            uri,
            f"no MLflow server answers there: {error}",
            "start it, correct the URI, or leave it out for a local file",
        )


def _home() -> Iterator[Problem]:
    """A problem unless millrace's own folder of this user can be written."""
    try:
        folder = home()
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        yield Problem(
            "MILLRACE_HOME",
            os.environ.get("MILLRACE_HOME", "~/.millrace"),
            f"no folder that can be written: {error.strerror or error}",
            "export MILLRACE_HOME=FOLDER with a folder that you can write",
        )


def check_machine(config: RunConfig) -> Iterator[Problem]:
    """Problems of this host if the run lives on it, and of the addresses that the configuration gives."""
    here, gpus = config.placement.ray_address is None, visible_gpus()
    of_home = [*_home()]
    yield from of_home
    if here and not of_home:
        try:
            head.check_length()
        except ConfigError as error:
            yield Problem("RAY_TMPDIR", os.environ.get("RAY_TMPDIR"), error.reason, error.remedy or "")
    if here and config.trainer.device == "cuda" and not gpus:
        yield Problem("trainer.device", "cuda", "this host has no NVIDIA GPU", "set it to auto or cpu")
    if here and config.placement.colocate and config.trainer.device == "auto" and not gpus:
        yield config.problem("placement.colocate", "this host has no NVIDIA GPU to share", "set it to false")
    needed = resource_layout(config, gpus=True).needed["GPU"]
    if here and 0 < gpus < needed:
        yield config.problem(
            "trainer.world_size",
            f"trainer and engines need {needed:g} GPUs, and this host shows {gpus}",
            "lower it, engines.count or engines.gpus, set placement.colocate=true, or join a cluster by placement.ray_address",
        )
    if here:
        yield from _engines(config, gpus)
    if isinstance(config.engines, ExternalEngines):
        for address in config.engines.addresses:
            yield from engine_answers(address, config.engines.key)
    if here:
        yield from _listens(config.engines.host)
    folder = None if config.sync.by_url else config.sync.directory
    if folder and here:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            remedy = remedy_of(error, "make it, or leave it out")
            yield Problem(
                "sync.directory", folder, f"no folder that can be written: {error.strerror}", remedy
            )


def _engines(config: RunConfig, gpus: int) -> Iterator[Problem]:
    """What the kind of engine that this host would start lacks, or does not find here."""
    e = config.engines
    kind = e.kind_at(gpus)
    if e.prefill and (not kind.prefills_apart or (kind.runs_on == "gpu" and not gpus)):
        yield config.problem(
            "engines.prefill",
            "without a GPU engines are embedded ones, which prefill and decode",
            "set it to 0",
        )
    # a rule of the configuration has reported a grammar that no kind has
    lacks_grammar = not kind.has_grammar and any(other.has_grammar for other in e.kinds)
    for place, sampling in config.samplings if lacks_grammar else ():
        for name, value in sampling.grammar.items():
            yield Problem(
                f"{place}.{name}",
                value,
                f"without a GPU engines are {kind.name} ones, which have no grammar backend",
                "leave it out, or run on a host with a GPU",
            )
    if e.router and not importlib.util.find_spec("sglang_router"):
        yield Problem("engines.router", e.router.policy, *ROUTER_MISSING)
    if kind is SGLANG:
        yield from _sglang(config, gpus)


def _sglang(config: RunConfig, gpus: int) -> Iterator[Problem]:
    e = config.engines
    if e.kinds == (SGLANG,) and not sglang_finds("sglang"):
        yield Problem(
            "engines.kind",
            "sglang",
            "SGLang is not installed",
            "install it, or set engines.kind to auto or embedded",
        )
    yield from _keeps_requests(config)
    if e.prefill:
        yield from _transfers(e.sglang.get("disaggregation_transfer_backend", "mooncake"))
    algorithm = str(e.sglang.get("speculative_algorithm") or "NGRAM")
    if gpus and algorithm.upper() != "NGRAM" and not sglang_finds("deep_gemm"):
        yield Problem(
            "engines.sglang.speculative_algorithm",
            algorithm,
            "SGLang imports deep_gemm when it starts with a draft model, and does not find it",
            "install sgl-deep-gemm where SGLang is, or set it to NGRAM",
        )


def _keeps_requests(config: RunConfig) -> Iterator[Problem]:
    version, _ = server_args()
    pipeline = config.pipeline
    keeps = bool(pipeline.ahead) and pipeline.on_update in ("retract", "keep")
    if keeps and version != UNTOLD and not keeps_requests(version):
        yield config.problem(
            "pipeline.on_update",
            f"SGLang {version} is installed, which cannot keep requests while weights change",
            "set it to resend, or install SGLang 0.5.23 or newer",
        )


def check_host_memory(config: RunConfig, shape: Architecture) -> Iterator[Problem]:
    """A problem if ranks on this host's GPUs need more host memory than the host has."""
    if config.placement.ray_address:
        return
    parts = host_memory(config, shape, layout_of(config, visible_gpus()))
    needed, total = sum(part.size for part in parts), psutil.virtual_memory().total
    if needed <= total:
        return
    reason = f"the trainer's ranks keep {needed / 2**30:.0f} GiB in this host's memory, which is {total / 2**30:.0f} GiB: "
    reason += ", ".join(f"{part.name} {part.size / 2**30:.0f} GiB" for part in parts)
    if config.saves_in_background:
        remedy = "set it to false, and iterations wait until their checkpoints are written; or give the node more memory"
        yield config.problem("checkpoint.background", reason, remedy)
    elif config.trainer.optimizer.offload:
        yield config.problem("trainer.optimizer.offload", reason, "lower it, or give the node more memory")
    else:
        remedy = "set it to false if the GPUs have room for trainer and engines at once, or give the node more memory"
        yield config.problem("placement.offload_trainer", reason, remedy)


def check_windows(config: RunConfig, shape: Architecture) -> Iterator[Problem]:
    """A problem if SGLang attends to more keys than the model does: its models of some families have no windows."""
    how, kind = family_named(shape.family).windows, layout_of(config, visible_gpus()).engine_kind
    narrowest = min(filter(None, shape.windows), default=0)
    longest = config.data.max_prompt_tokens + config.rollout.longest_response
    if how is None or how.in_sglang or kind is not SGLANG or not 0 < narrowest < longest:
        return
    yield config.problem(
        "engines.kind",
        f"SGLang's {shape.family} model attends to all keys, this one to a window of {narrowest}",
        f"bound prompts and answers to {narrowest} tokens together, set it to embedded, or take another model",
    )


def check_output_layer(config: RunConfig, shape: Architecture) -> Iterator[Problem]:
    """A problem if SGLang would want an output layer from a model whose embedding is one: it would serve noise."""
    kind = layout_of(config, visible_gpus()).engine_kind
    if shape.tied and kind is SGLANG and not family_named(shape.family).ties_in_sglang:
        yield config.problem(
            "engines.kind",
            f"SGLang's {shape.family} model has an output layer, this one takes its embedding (tie_word_embeddings)",
            "set it to embedded, or take another model",
        )


def check_delta_layers(config: RunConfig, shape: Architecture) -> Iterator[Problem]:
    """A problem if SGLang would take other layers for those with delta net: it does not read layer_types."""
    kind = layout_of(config, visible_gpus()).engine_kind
    if shape.delta and kind is SGLANG and not shape.delta.by_interval(shape.layers):
        yield config.problem(
            "engines.kind",
            f"SGLang takes each layer whose number full_attention_interval = {shape.delta.interval} divides for one of attention, "
            "and layer_types of config.json says others",
            "set it to embedded, or write the interval of layer_types into config.json",
        )


def check_disk(config: RunConfig, shape: Architecture) -> Iterator[Problem]:
    """A problem if the disk of the run's folder has no room for its checkpoints and exports."""
    store = RunFolder(config.storage.root, config.run.name).store
    if not store.local:
        return
    folder = Path(store.root)
    parts = [part for part in weights_on_disk(config, shape, numbers_of(config)) if part.size]
    needed = sum(part.size for part in parts)
    # these files stay, or make room
    there = sum(_bytes(folder / name) for name in ("checkpoints", "exports"))
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    room = shutil.disk_usage(nearest).free + there
    if needed > room:
        listed = ", ".join(f"{part.name} {size_text(part.size)}" for part in parts)
        yield config.problem(
            "checkpoint.keep_last",
            f"the run keeps {size_text(needed)} of weights ({listed}), and the disk of {nearest} has {size_text(room)} for them",
            "free space, lower it, or give storage.root another disk",
        )


def _bytes(folder: Path) -> int:
    """Size of a folder's files. A live run may remove some meanwhile."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(os.path.join(where, name)).st_size
    return size


def _transfers(library: str) -> Iterator[Problem]:
    package, wheel = TRANSFERS.get(library, (None, None))
    if package and not sglang_finds(package):
        yield Problem(
            "engines.sglang.disaggregation_transfer_backend",
            library,
            f"it moves KV caches between engines, and SGLang does not find {package}",
            f"install {wheel} where SGLang is, or name another",
        )


def engine_answers(address: str, key: str | None) -> Iterator[Problem]:
    """A problem unless an engine answers at the address and accepts the key, which is a reference."""
    try:
        given = resolved(key, "engines.key")
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        request = urllib.request.Request(f"{address.rstrip('/')}/model_info", headers=headers)
        with urllib.request.urlopen(request, timeout=10):
            return
    except ConfigError:
        # check_references reports it
        return
    except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
        if isinstance(error, urllib.error.HTTPError) and error.code == 401:
            reason = f"the engine at {address} asks for another key"
            yield Problem(
                "engines.key", key, reason, "give the engine's api_key as ${env:NAME} or ${prefect:BLOCK}"
            )
            return
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
