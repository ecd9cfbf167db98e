"""Upstream options that a configuration may not pass through, and why: millrace's own, refused, or set by another field."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.core.config.parts.problems import Problem

SGLANG_OWNED = (
    "port",
    "base_gpu_id",
    "weight_version",
    "skip_tokenizer_init",
    "disaggregation_bootstrap_port",
    "node_rank",
    "dist_init_addr",
    "enable_draft_weights_cpu_backup",
    "max_loras_per_batch",
    "max_loaded_loras",
    "lora_strict_loading",
)

SGLANG_ELSEWHERE = {
    "model_path": "model.path",
    "host": "engines.host",
    "tp_size": "engines.gpus",
    "nnodes": "engines.nodes",
    "dtype": "model.dtype",
    "enable_memory_saver": "placement.offload_engines",
    "disaggregation_mode": "engines.prefill",
    "random_seed": "run.seed",
    "enable_return_routed_experts": "rollout.routing_replay",
    "enable_lora": "sync.lora",
    "max_lora_rank": "trainer.lora.rank",
    "lora_target_modules": "trainer.lora.targets",
}

_BIASED = "tokens would come from another distribution than their log-probabilities"

_LOCKED = "a configuration is stored with the run, and a secret must not be"
_ALONE = "let engines listen on a private address (engines.host)"
_KEY = f"{_LOCKED}: millrace makes a key for each engine and for the router"
_PLAIN = f"engines are reached over plain HTTP: {_ALONE}"
_HTTP = "engines are reached over HTTP"

_OWN_FORMAT = (
    "weights are sent in model.dtype after each step, and a quantized engine takes none of that type"
)

SGLANG_REFUSED = {
    "quantization": _OWN_FORMAT,
    "torchao_config": _OWN_FORMAT,
    "speculative_accept_threshold_single": _BIASED,
    "speculative_accept_threshold_acc": _BIASED,
    "api_key": _KEY,
    "admin_api_key": _KEY,
    "ssl_keyfile": _PLAIN,
    "ssl_certfile": _PLAIN,
    "ssl_ca_certs": _PLAIN,
    "ssl_keyfile_password": f"{_LOCKED}, and engines are reached over plain HTTP",
    "enable_ssl_refresh": _PLAIN,
    "grpc_mode": _HTTP,
    "smg_grpc_mode": _HTTP,
    "preferred_sampling_params": "samples would not record its changes: every request has rollout.sampling",
    "lora_paths": "requests name no adapter, or one that the trainer made (sync.lora)",
    "tokenizer_worker_num": "SGLang then takes no key, and millrace gives each engine one; prompts come as tokens anyway",
    "pp_size": "all GPUs of an engine (engines.gpus) share each layer, and none is left for another stage",
}

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password", "control_plane_api_keys")

ROUTER_OWNED = (
    "host",
    "port",
    "worker_urls",
    "policy",
    "request_timeout_secs",
    "worker_startup_timeout_secs",
    "prometheus_host",
    "prometheus_port",
    "disable_retries",
    "disable_circuit_breaker",
    "disable_health_check",
)

_OTHER_ENGINES = "it is for engines that are not this run's"
_LIMIT = "it refuses requests, and rollout.max_concurrency bounds them already"

ROUTER_REFUSED = {
    "mini_lb": "it is another program, for debugging",
    "pd_disaggregation": "millrace's dispatcher pairs them: set engines.prefill and leave engines.router out",
    "dp_aware": "it sends to parts of an engine, and an engine is used as a whole",
    "backend": _OTHER_ENGINES,
    "enable_igw": _OTHER_ENGINES,
    "service_discovery": _OTHER_ENGINES,
    "api_key": _KEY,
    "control_plane_api_keys": _KEY,
    "jwt_issuer": "its workers could not be changed without a token",
    "server_cert_path": "it is reached over plain HTTP",
    "max_concurrent_requests": _LIMIT,
    "rate_limit_tokens_per_second": _LIMIT,
}


def option_problems(
    place: str,
    options: Mapping[str, Any],
    owned: Sequence[str],
    refused: Mapping[str, str],
    elsewhere: Mapping[str, str],
) -> Iterator[Problem]:
    """Upstream options that `place` may not set: millrace's own, refused ones, and options that another field sets."""
    for name, value in options.items():
        field = f"{place}.{name}"
        if name in owned:
            yield Problem(field, value, "millrace sets it itself", "remove it")
        elif name in refused:
            shown = "***" if name in SECRETS else value
            yield Problem(field, shown, f"not allowed: {refused[name]}", "remove it")
        elif name in elsewhere:
            yield Problem(
                field, value, f"it follows from {elsewhere[name]}", "remove it and set that instead"
            )
