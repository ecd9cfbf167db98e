"""Rules of `engines`."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from millrace.core.config.algorithm.rules import unweighed
from millrace.core.config.engines import LOOPBACK, ExternalEngines
from millrace.core.config.parts.problems import Problem
from millrace.core.config.passthrough_rules import (
    ROUTER_OWNED,
    ROUTER_REFUSED,
    SGLANG_ELSEWHERE,
    SGLANG_OWNED,
    SGLANG_REFUSED,
    option_problems,
)
from millrace.core.config.run_config import RunConfig

WITHOUT_LOGPROBS = ("DFLASH", "DSPARK")
WITHOUT_HANDOFF = ("STANDALONE", "NGRAM")


def problems(config: RunConfig) -> Iterator[Problem]:
    """Settings of engines that contradict each other, or the rest of the configuration."""
    yield from _kv_cache(config)
    if isinstance(config.engines, ExternalEngines):
        yield from _external(config, config.engines)
    yield from _over_hosts(config)
    yield from _router(config)
    yield from _prefill(config)
    yield from _speculative(config)
    yield from _upstream_options(config)
    kept = str(config.engines.sglang.get("kv_cache_dtype", "auto"))
    if kept not in ("auto", "bf16", "bfloat16") and not config.algorithm.supervised:
        yield from unweighed(
            config,
            f"with engines.sglang.kv_cache_dtype={kept} tokens are made from rounded keys and values",
        )


def _kv_cache(config: RunConfig) -> Iterator[Problem]:
    if config.algorithm.supervised:
        return
    for field, tokens in config.response_budgets.items():
        needed = config.data.max_prompt_tokens + tokens
        room = config.engines.cached(needed)
        if room is not None and needed > room:
            yield Problem(
                "engines.max_total_tokens",
                room,
                f"one sample may need data.max_prompt_tokens + {field} = {needed} tokens of KV cache",
                f"set it to {needed} or more",
            )
            return


def _external(config: RunConfig, e: ExternalEngines) -> Iterator[Problem]:
    """Addresses that lead to no engine, and weights that external engines cannot read."""
    parts = [urlsplit(address) for address in e.addresses]
    bad = [
        address
        for address, at in zip(e.addresses, parts, strict=True)
        if at.scheme not in ("http", "https") or not at.hostname
    ]
    if bad or len(set(e.addresses)) < len(e.addresses):
        yield config.problem(
            "engines.addresses",
            "engines.kind=external needs the URL of each engine, once",
            "give URLs as in http://host:30000",
        )
    loads_folders = config.sync_kind == "disk" or config.adapters_by_name
    if loads_folders and config.sync.by_url:
        yield config.problem(
            "sync.directory",
            "no process of millrace runs beside an external engine that could copy weights from storage",
            "name a folder that trainer and engines see under the same path, or set sync.kind=broadcast",
        )
    if loads_folders and config.sync.directory is None and any(at.hostname not in LOOPBACK for at in parts):
        yield config.problem(
            "sync.directory",
            "engines on other hosts do not see this host's shared memory, where weights go",
            "name a folder that trainer and engines see under the same path",
        )


def _over_hosts(config: RunConfig) -> Iterator[Problem]:
    """What an engine over several hosts needs, and cannot do."""
    e = config.engines
    if e.nodes == 1:
        return
    if e.gpus % e.nodes:
        yield config.problem(
            "engines.nodes",
            f"each host has the same share of engines.gpus = {e.gpus}",
            "set it to a number that divides engines.gpus",
        )
    if not config.placement.tensor_over_hosts:
        yield config.problem(
            "engines.nodes",
            "the GPUs of an engine are one tensor parallel group, whose layers would wait for the network",
            "set placement.tensor_over_hosts=true if they may, or leave it out",
        )
    if e.prefill:
        yield config.problem(
            "engines.prefill",
            f"engines hand KV caches over from one host to one other, and engines.nodes = {e.nodes}",
            "set it to 0, or engines.nodes=1",
        )
    if config.sync_kind == "disk" and config.sync.by_url:
        yield config.problem(
            "sync.directory",
            f"each of an engine's {e.nodes} hosts would have its copy under another path",
            "name a folder that all nodes see under the same path, or set sync.kind=broadcast",
        )


def _router(config: RunConfig) -> Iterator[Problem]:
    """What sglang-router 0.3.2 does not do: see millrace.connectors.engines.sglang.router."""
    router = config.engines.router
    if router is None:
        return
    if router.policy == "power_of_two" and config.engines.count < 2:
        yield config.problem(
            "engines.router.policy",
            f"it chooses between two engines, and engines.count = {config.engines.count}",
            "take another policy, or more engines",
        )
    for place, sampling in config.samplings:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(sampling, name)
            rounded = float(f"{value:.6g}")
            if rounded != value:
                yield Problem(
                    f"{place}.{name}",
                    value,
                    "sglang-router keeps six digits of it, so engines and trainer would use different values",
                    f"set it to {rounded:g}, or leave engines.router out",
                )


def _prefill(config: RunConfig) -> Iterator[Problem]:
    """What engines that only prefill or only decode cannot do."""
    e = config.engines
    if not e.prefill:
        return
    if e.prefill >= e.count:
        yield config.problem(
            "engines.prefill",
            f"of engines.count = {e.count} none is left to decode",
            "raise engines.count, or lower it",
        )
    if config.engines_sleep and e.sglang.get("disaggregation_transfer_backend") == "nixl":
        yield Problem(
            "engines.sglang.disaggregation_transfer_backend",
            "nixl",
            "SGLang does not deregister the KV cache from nixl before it releases its memory",
            "set it to mooncake, or placement.offload_engines=false",
        )
    if e.router:
        yield Problem(
            "engines.router",
            e.router.policy,
            "millrace's dispatcher pairs an engine that prefills with one that decodes",
            "leave it out, or set engines.prefill=0",
        )


def _speculative(config: RunConfig) -> Iterator[Problem]:
    """What SGLang's speculative decoding does not support, or would silently change in samples."""
    e = config.engines
    if e.sglang.get("speculative_algorithm") is None:
        return
    field, algorithm = "engines.sglang.speculative_algorithm", str(e.sglang["speculative_algorithm"]).upper()
    if algorithm in WITHOUT_LOGPROBS:
        yield Problem(
            field, algorithm, "it gives no log-probabilities", "take EAGLE, EAGLE3, STANDALONE or NGRAM"
        )
    if e.prefill and algorithm in WITHOUT_HANDOFF:
        yield Problem(
            field,
            algorithm,
            "an engine that only decodes cannot start with it",
            "set engines.prefill=0, or take EAGLE or EAGLE3",
        )
    for place, sampling in config.samplings:
        if sampling.min_p:
            yield Problem(
                f"{place}.min_p",
                sampling.min_p,
                "SGLang's speculative decoding samples without it",
                "set it to 0, or leave speculative decoding out",
            )
    reason = "SGLang loads no folder of weights into an engine that drafts, or loads the same into policy and draft"
    if config.sync_kind == "disk":
        yield Problem(field, algorithm, reason, "set sync.kind=broadcast, or share GPUs (ipc)")


def _upstream_options(config: RunConfig) -> Iterator[Problem]:
    sglang, router = config.engines.sglang, config.engines.router
    yield from option_problems("engines.sglang", sglang, SGLANG_OWNED, SGLANG_REFUSED, SGLANG_ELSEWHERE)
    if sglang.get("dp_size", 1) != 1 and not sglang.get("enable_dp_attention"):
        yield Problem(
            "engines.sglang.dp_size",
            sglang["dp_size"],
            "all GPUs of an engine (engines.gpus) hold one copy of the model, and none is left for another",
            "remove it and raise engines.count, or set engines.sglang.enable_dp_attention=true",
        )
    if router:
        yield from option_problems("engines.router.options", router.options, ROUTER_OWNED, ROUTER_REFUSED, {})
