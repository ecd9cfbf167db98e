"""The table of layouts that `millrace check` proposes, as text."""

from collections.abc import Iterator, Sequence

from millrace.connectors.host.gpu_memory import gpu_memory
from millrace.core.config.plan.memory import MemoryPart, size_text
from millrace.core.config.plan.preset_memory import KINDS, USED
from millrace.core.config.plan.proposals import Proposal, Proposals, proposals
from millrace.flows.preflight.check import Checked

GIB = 2**30
SHOWN = 6  # rows that fit, and rows that do not
PARTS = ("weights", "gradients", "optimizer", "activations", "logits")  # how the names of parts begin
HEAD = ("tp", "pp", "cp", "ep", "dp", "recompute", *PARTS, "others", "all")


def proposed(found: Checked, gpus: int, memory_gib: float | None) -> list[str]:
    """The table for a configuration's model; empty without its sizes, or if megatron-core's trainer does not train it."""
    trainer, shape = found.config.trainer, found.model.shape
    if shape is None or not trainer.by_megatron or found.config.pipeline.rollouts_only:
        return []
    # `auto` as on GPUs, although this host may have none
    config = found.config.with_dtype("float32" if found.model.stored == "float32" else "bfloat16")
    here = gpu_memory() if memory_gib is None else None
    size = here or int((memory_gib or KINDS[80]) * GIB)
    return layout_table(proposals(config, shape, gpus, size))


def layout_table(found: Proposals) -> list[str]:
    """Lines: the layouts that fit, by memory of the fullest rank, and why others do not."""
    room = f"{found.gpus} GPUs of {size_text(found.gpu_bytes)}, {USED:.0%} of it used"
    lines = [
        f"layouts of the trainer on {room}: memory of the fullest rank in GiB, the likely fastest first; tp with sp"
    ]
    rows = [HEAD, *(_row(each) for each in found.fit[:SHOWN])]
    if found.fit:
        lines += _aligned(rows)
    else:
        lines.append("none fits: take more GPUs, lower trainer.max_pack_tokens, or a smaller model")
    if len(found.fit) > SHOWN:
        lines.append(f"and {len(found.fit) - SHOWN} more that fit")
    lines += _others(found)
    return lines


def _others(found: Proposals) -> Iterator[str]:
    if found.too_large:
        yield (
            "too large, also with trainer.recompute=full: "
            + ", ".join(
                f"{_name(each)} ({each.size / GIB:.0f} GiB, {_largest(each.parts)})"
                for each in found.too_large[:SHOWN]
            )
            + (f" and {len(found.too_large) - SHOWN} more" if len(found.too_large) > SHOWN else "")
        )
    for reason, values in found.undivided.items():
        yield f"not {', '.join(values)}: {reason}"


def _row(each: Proposal) -> tuple[str, ...]:
    t, sizes = each.config.trainer, _by_name(each.parts)
    p = t.parallel
    cut = (p.tensor, p.pipeline, p.context, p.expert, each.config.data_parallel)
    amounts = (*(sizes[name] for name in (*PARTS, "others")), each.size)
    return *map(str, cut), t.recompute, *(f"{size / GIB:.1f}" for size in amounts)


def _by_name(parts: Sequence[MemoryPart]) -> dict[str, int]:
    sizes = dict.fromkeys((*PARTS, "others"), 0)
    for part in parts:
        sizes[next((name for name in PARTS if part.name.startswith(name)), "others")] += part.size
    return sizes


def _largest(parts: Sequence[MemoryPart]) -> str:
    sizes = _by_name(parts)
    name = max(sizes, key=sizes.__getitem__)
    return f"{name} {sizes[name] / GIB:.0f}"


def _name(each: Proposal) -> str:
    p = each.config.trainer.parallel
    named = {"tp": p.tensor, "pp": p.pipeline, "cp": p.context, "ep": p.expert}
    return " × ".join(f"{axis} {size}" for axis, size in named.items() if size > 1) or "dp alone"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
