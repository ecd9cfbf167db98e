"""What fields of engines, placement and sync demand of each other. Each rule says which clash and how to mend it.

Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from millrace.core.config.problems import Problem
from millrace.core.config.run import RunConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WITHOUT_LOGPROBS = ("DFLASH", "DSPARK")
WITHOUT_HANDOFF = ("STANDALONE", "NGRAM")


def problems(config: RunConfig) -> list[Problem]:
    """What does not go together; empty when all does."""
    found = [*_kinds(config), *_sharing(config), *_sync(config)]
    found += [*_external(config), *_router(config), *_prefill(config), *_speculative(config)]
    return found


def _kinds(config: RunConfig) -> Iterator[Problem]:
    e = config.engines
    if e.kind == "embedded" and e.sglang:
        yield Problem(
            "engines.sglang",
            ", ".join(e.sglang),
            "engines.kind=embedded starts no SGLang",
            "remove the options, or set engines.kind=sglang",
        )
    if e.kind == "embedded" and e.gpus > 1:
        yield Problem(
            "engines.gpus",
            e.gpus,
            "an embedded engine runs on one device",
            "set it to 1, or engines.kind=sglang",
        )


def _sharing(config: RunConfig) -> Iterator[Problem]:
    e = config.engines
    if config.placement.colocate and (e.kind == "embedded" or config.trainer.device == "cpu"):
        yield Problem("placement.colocate", True, "without GPUs there is nothing to share", "set it to false")
    elif config.placement.colocate and config.trainer.world_size != e.count * e.gpus:
        yield Problem(
            "trainer.world_size",
            config.trainer.world_size,
            f"the trainer shares GPUs with engines.count × engines.gpus = {e.count} × {e.gpus}",
            "make both the number of GPUs, or set placement.colocate=false",
        )


def _sync(config: RunConfig) -> Iterator[Problem]:
    if config.sync.kind == "ipc" and not config.placement.colocate:
        yield Problem(
            "sync.kind",
            "ipc",
            "GPU memory is handed over within a GPU",
            "set it to broadcast or disk, or set placement.colocate=true",
        )
    if config.sync.kind == "broadcast" and config.placement.colocate:
        yield Problem("sync.kind", "broadcast", "NCCL joins no GPU to a group twice", "set it to ipc or disk")
    if config.sync.verify and config.sync_kind == "disk":
        yield Problem(
            "sync.verify",
            True,
            "it compares what engines hold with what they load from disk, and sync.kind=disk gives them nothing else",
            f"set sync.kind={'ipc' if config.placement.colocate else 'broadcast'}, or set it to false",
        )
    e = config.engines
    on_cpu = e.kind == "embedded", config.trainer.device == "cpu"
    if config.sync.kind == "broadcast" and e.kind != "external" and on_cpu[0] != on_cpu[1]:
        yield Problem(
            "sync.kind",
            "broadcast",
            f"trainer.device={config.trainer.device} and engines.kind={e.kind} may have no transport in common",
            "set trainer.device=cuda and engines.kind=sglang, or trainer.device=cpu and engines.kind=embedded, or disk",
        )


def _external(config: RunConfig) -> Iterator[Problem]:
    """Engines that somebody else runs: nothing of theirs is set here, and they read weights where the trainer writes."""
    e = config.engines
    if e.kind != "external":
        if e.addresses:
            yield Problem(
                "engines.addresses",
                e.addresses,
                f"engines.kind={e.kind} starts its own",
                "set engines.kind=external, or remove them",
            )
        return
    parts = [urlsplit(address) for address in e.addresses]
    bad = [
        a
        for a, at in zip(e.addresses, parts, strict=True)
        if at.scheme not in ("http", "https") or not at.hostname
    ]
    if bad or not e.addresses or len(set(e.addresses)) < len(e.addresses):
        yield Problem(
            "engines.addresses",
            bad or e.addresses,
            "engines.kind=external needs the URL of each engine, once",
            "give URLs as in http://host:30000",
        )
    elif e.count != len(e.addresses):
        yield Problem(
            "engines.count",
            e.count,
            f"engines.addresses has {len(e.addresses)}",
            f"set it to {len(e.addresses)}",
        )
    if e.sglang:
        yield Problem(
            "engines.sglang",
            ", ".join(e.sglang),
            "external engines have the options they were started with",
            "give them there, and remove them here",
        )
    if config.placement.colocate:
        yield Problem(
            "placement.colocate", True, "external engines share no GPU with the trainer", "set it to false"
        )
    loads_folders = config.sync_kind == "disk" or config.sync.verify
    if loads_folders and config.sync.by_url:
        yield Problem(
            "sync.directory",
            config.sync.directory,
            "nothing of millrace runs beside an external engine that could copy weights from storage",
            "name a folder that trainer and engines see under the same path, or set sync.kind=broadcast without sync.verify",
        )
    if loads_folders and config.sync.directory is None and any(at.hostname not in LOOPBACK for at in parts):
        yield Problem(
            "sync.directory",
            None,
            "engines on other hosts do not see this host's shared memory, where weights go",
            "name a folder that trainer and engines see under the same path",
        )


def _router(config: RunConfig) -> Iterator[Problem]:
    """What sglang-router 0.3.2 does not do: see millrace.connectors.sglang.router."""
    router = config.engines.router
    if router is None:
        return
    if router.policy == "power_of_two" and config.engines.count < 2:
        yield Problem(
            "engines.router.policy",
            router.policy,
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
                    "sglang-router keeps six digits of it, so engines would sample by another value than the trainer",
                    f"set it to {rounded:g}, or leave engines.router out",
                )


def _prefill(config: RunConfig) -> Iterator[Problem]:
    """What engines that only prefill, and those that go on from there, cannot do."""
    e = config.engines
    if not e.prefill:
        return
    if e.kind == "embedded":
        yield Problem(
            "engines.prefill",
            e.prefill,
            "an embedded engine does both",
            "set it to 0, or engines.kind=sglang",
        )
    if e.prefill >= e.count:
        yield Problem(
            "engines.prefill",
            e.prefill,
            f"of engines.count = {e.count} none is left to decode",
            "raise engines.count, or lower it",
        )
    if config.engines_sleep and e.sglang.get("disaggregation_transfer_backend") == "nixl":
        yield Problem(
            "engines.sglang.disaggregation_transfer_backend",
            "nixl",
            "SGLang does not take the KV cache out of nixl's hands before it gives its memory back",
            "set it to mooncake, or placement.offload_engines=false",
        )
    if e.router:
        yield Problem(
            "engines.router",
            e.router.policy,
            "the own dispatcher pairs an engine that prefills with one that decodes",
            "leave it out, or set engines.prefill=0",
        )


def _speculative(config: RunConfig) -> Iterator[Problem]:
    """What SGLang's speculative decoding cannot do, or would do to samples without a word."""
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
            "an engine that only decodes cannot begin with it",
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
    what = "SGLang loads no folder of weights into an engine that drafts, or the same into policy and draft"
    if config.sync_kind == "disk":
        yield Problem(field, algorithm, what, "set sync.kind=broadcast, or share GPUs (ipc)")
    if config.sync.verify:
        yield Problem("sync.verify", True, what, "set it to false, or leave speculative decoding out")
