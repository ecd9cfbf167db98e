"""Command lines of SGLang and sglang-router, with all their options.

Owns how configuration becomes arguments and environment. SGLang's options are checked against the installed version's
ServerArgs.
"""

import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.connectors.engines.launch import EngineStart, Launch, Node, free_port
from millrace.connectors.engines.sglang.server_args import (
    PYTHON_PATH,
    argument,
    decode_graphs,
    option_arguments,
    option_problems,
    own_folders,
)
from millrace.connectors.storage.kernel_cache import kernel_cache
from millrace.core.config import RunConfig
from millrace.core.config.engines import LOOPBACK
from millrace.core.errors import ConfigError
from millrace.core.families.adapters import targeted
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config

ROUTER_MISSING = (
    "sglang-router is not installed",
    "pip install 'millrace[router]', or leave it out: millrace's dispatcher needs nothing",
)
FOREVER_S = 10 * 365 * 24 * 3600  # no time limit: millrace checks progress instead
EXTERNAL_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"
SLEEP = "millrace_sleep_in_sglang"  # what the process of an engine that sleeps loads
IN_SERVER = "millrace_in_sglang"  # this and more
# classes of models that SGLang does not serve right through updates of weights unless its process loads IN_SERVER
CORRECTED = frozenset({"Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"})
COLOCATED_MEMORY = 0.5  # share of the GPU for weights and KV cache beside a trainer


def launch_sglang(start: EngineStart) -> Launch:
    """Start SGLang on a free port: the whole engine, or its process on one of the nodes that it spans."""
    host = _host(start.config, start.node)
    port, bootstrap = free_port(host), free_port(host)
    keys = write_sglang_keys(start.folder, start.key)
    command = sglang_command(start.config, start.model, port, start.index, bootstrap, keys, start.node)
    patience = start.config.rollout.progress_timeout_s
    environment = sglang_environment(os.environ, start.address, patience)
    if not CORRECTED.isdisjoint(_model_classes(start.model)):
        environment = with_corrections(environment, IN_SERVER)
    elif start.config.engines_sleep:
        environment = with_corrections(environment, SLEEP)
    kernels = kernel_cache(start.config, f"engine {start.index}", own_folders())
    if kernels:
        environment |= kernels.environment
    return Launch(command, lambda: port, environment, kernels)


def _host(config: RunConfig, node: Node | None) -> str:
    """Where a process listens. On further nodes it answers /health alone, which nobody asks it, so it listens on loopback."""
    return LOOPBACK[0] if node and node.rank else config.engines.host


def write_sglang_keys(folder: Path, key: str) -> Path:
    """Write a file for SGLang's --config with the key that requests must bring, in a folder that only this user can read.

    A file, since every user of the machine can see command lines. SGLang has read it by the time that it answers.
    """
    path = folder / "keys.yaml"
    path.write_text(json.dumps({"api-key": key, "admin-api-key": key}))
    return path


def sglang_command(
    config: RunConfig,
    model: str,
    port: int,
    index: int,
    bootstrap_port: int,
    keys: Path,
    node: Node | None = None,
) -> list[str]:
    """Start SGLang engine `index` on the GPUs that its process sees.

    bootstrap_port: at which decoding engines meet this one if it only prefills. keys: the file of write_sglang_keys. node: of the
    engine's nodes, if it spans several. Raises ConfigError for an option that the installed version does not have.
    """
    e = config.engines
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    command += ["--host", _host(config, node), "--port", str(port), "--config", str(keys)]
    if node:
        command += ["--nnodes", str(e.nodes), "--node-rank", str(node.rank)]
        command += ["--dist-init-addr", node.meeting]
    command += ["--tp-size", str(e.gpus), "--dtype", config.dtype, "--random-seed"]
    command += [str(config.run.seed + index), "--weight-version", "initial"]
    if config.placement.colocate and "mem_fraction_static" not in e.sglang:
        command += ["--mem-fraction-static", str(COLOCATED_MEMORY)]
    if config.engines_sleep:
        command.append("--enable-memory-saver")
        # weight updates do not restore a draft model, so SGLang must keep its weights
        if e.sglang.get("speculative_algorithm"):
            command.append("--enable-draft-weights-cpu-backup")
    if config.rollout.routing_replay:
        command.append("--enable-return-routed-experts")
    if config.adapters_by_name:
        command += _adapter_options(config, model)
    if e.prefill:
        command += ["--disaggregation-mode", "prefill" if index < e.prefill else "decode"]
        if index < e.prefill:
            command += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    return command + _options({**decode_graphs(e.sglang, config.rollout.max_concurrency), **e.sglang})


def _adapter_options(config: RunConfig, model: str) -> list[str]:
    """Options for adapters by name.

    Strict, since SGLang otherwise serves an adapter without the tensors that it cannot place. It has as many slots as versions, and
    no limit of loaded ones, beyond which it would unload the adapter that was named least recently.
    """
    lora = config.trainer.lora
    assert lora is not None
    found = targeted(architecture(read_hf_config(model)), lora.targets)
    ends = sorted({matrix.name.rpartition(".")[2] for matrix in found})
    command = ["--enable-lora", "--lora-strict-loading", "--max-lora-rank", str(lora.rank)]
    return [*command, "--max-loras-per-batch", str(config.adapter_slots), "--lora-target-modules", *ends]


def router_command(config: RunConfig, port: int, metrics_port: int) -> list[str]:
    """Start sglang-router without engines, which are added later with their keys.

    It never retries a request, since a retried sample could not be recognised. It does not check engines either: the fleet does.
    """
    router = config.engines.router
    assert router is not None
    if importlib.util.find_spec("sglang_router") is None:
        raise ConfigError(f"engines.router: {'; '.join(ROUTER_MISSING)}")
    host = config.engines.host
    command = [sys.executable, "-m", "millrace.connectors.engines.sglang.router_process"]
    command += ["--host", host, "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--policy", router.policy, "--disable-retries", "--disable-circuit-breaker"]
    command += ["--disable-health-check", "--request-timeout-secs", str(FOREVER_S)]
    command += ["--worker-startup-timeout-secs", "10"]
    for name, value in {"log_level": "warn", **router.options}.items():
        command += argument(f"--{name.replace('_', '-')}", value)
    return command


def sglang_environment(given: Mapping[str, str], address: str, progress_timeout_s: float) -> dict[str, str]:
    """The server's environment: a separate Python path if one is named, an immediate /health, CUDA's runtime, addresses and timeouts.

    SGLang pins versions that conflict with other packages, so MILLRACE_SGLANG_PYTHONPATH may name a separate folder with it.
    The memory saver loads CUDA's runtime library by name, and pip puts the library into a folder that the loader does not search.
    Engines that exchange KV caches listen at `address`, like the server; if that is loopback, UCX uses loopback only. A request
    waits for room on the decoding engine without a limit, and for its KV cache as long as an engine may make no progress.
    """
    environment = dict(given)
    environment.setdefault("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", str(FOREVER_S))
    environment.setdefault("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", str(math.ceil(progress_timeout_s)))
    environment.setdefault("SGLANG_HOST_IP", address)
    if address in LOOPBACK:
        environment.setdefault("UCX_NET_DEVICES", "lo")
    if given.get(PYTHON_PATH):
        environment["PYTHONPATH"] = given[PYTHON_PATH]
    environment.setdefault("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0")
    libraries = [*_cuda_runtime(), *filter(None, given.get("LD_LIBRARY_PATH", "").split(os.pathsep))]
    if libraries:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return environment


def with_corrections(environment: Mapping[str, str], package: str) -> dict[str, str]:
    """The environment of a server that also loads a package of `in_server`, by SGLang's own setting for packages with models.

    A package with models that the user named there is loaded too.
    """
    folders = [environment.get("PYTHONPATH", ""), str(Path(__file__).parent / "in_server")]
    corrections = {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        EXTERNAL_MODELS: package,
        "MILLRACE_EXTERNAL_MODEL_PACKAGE": environment.get(EXTERNAL_MODELS, ""),
    }
    return {**environment, **corrections}


def _model_classes(model: str) -> list[str]:
    """The classes that a model's config.json names."""
    classes: list[str] | None = json.loads((Path(model) / "config.json").read_text()).get("architectures")
    return classes or []


def _cuda_runtime() -> list[str]:
    """Folders of this Python's CUDA runtime."""
    found = importlib.util.find_spec("nvidia")
    roots = found.submodule_search_locations if found and found.submodule_search_locations else []
    return sorted({str(path.parent) for root in roots for path in Path(root).glob("*/lib/libcudart.so*")})


def _options(options: dict[str, Any]) -> list[str]:
    """engines.sglang as arguments. Raises ConfigError for the first that the installed version does not accept."""
    for problem in option_problems(options):
        raise ConfigError(str(problem))
    return option_arguments(options)
