"""docs/performance.md and benchmarks/README.md, made from kept results: `python -m benchmarks.page` writes them, `--check` says
if they are current. The page of the docs has the rows of CHOSEN, the other one all rows and all benchmarks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.figures.rows import GPUS, Row, cpu_rows, gpu_rows
from benchmarks.kept import KeptResults

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
ALL = ROOT / "benchmarks" / "README.md"
CHOSEN = (
    "quickstart, held-out accuracy, seed 0",
    "an iteration's overhead: neither generation nor training nor sync",
    "trainer's step against plain Hugging Face and AdamW, larger batch",
    "embedded engine, 64 requests at once, against one `generate` after the other",
    "`millrace check`, start to answer",
    "everything killed, replay of 4: until the run works again",
    "kill matrix: points that hold",
    "weight sync on one GPU, 4B",
    "rollout over raw SGLang, 0.6B, 256 × 512 tokens",
    "trainer's step, 0.6B, 8 × 2,048 tokens",
    "trainer's step, 0.6B, 1 × 16,384 tokens",
    "trainer's step, 4 layers of 30B-A3B, 8 × 2,048 tokens",
    "iteration, 0.6B, 128 × 2,048 tokens",
    "its checkpoints of 4B, 56 GB, written while the run goes on",
    "learning, 25M parameters, held-out accuracy",
)
NOT_BENCHMARKS = {
    "__init__",
    "engines",
    "expert_parallel",
    "expert_parts",
    "offload",
    "generating",
    "shards",
    "batch_rows",
    "rows",
    "tails",
    "kernel_profile",
    "kept",
    "killed_driver",
    "page",
    "shapes",
    "stored_iterations",
}

MADE = "<!-- Made by `python -m benchmarks.page` from benchmarks/results; edit those files or benchmarks/figures. -->\n\n"
HEAD = """\
# Performance

For people who want to know how fast millrace is. Each row names the command that measures it again.

[All figures and benchmarks](../benchmarks/README.md) are beside the programs that measure them. A figure comes from the newest comparable run
kept in [benchmarks/results](../benchmarks/results). An empty cell was not measured.

"""
ALL_HEAD = """\
# Figures and benchmarks

For people who change what is measured, or doubt a figure. Each row names the command that measures it again.

A figure comes from the newest comparable run kept in [results](results), one file a benchmark and device.
An empty cell was not measured. What limits a figure, and what was tried, stands by date in [LOG.md](LOG.md).

"""
CPU = """\
## On a CPU

Two cores of a shared x86-64 server. Its speed varies by half from minute to minute, so ratios are of one run each.

"""
GPU = """\

## On GPUs

One NVIDIA H100 (80 GB) or H200 (141 GB), which SGLang and Megatron share. {versions}.
Weights are random except in the learning rows; shapes are those of Qwen3. [GPUs and clusters]({docs}gpus.md) says how to set up a GPU.

"""
LEARNING = """\

![training reward and held-out accuracy by iteration](one_gpu_learning.png)

The picture shows `millrace train deployments/recipes/one_gpu.yaml` on one H200, 512 samples an iteration.
"""
BENCHMARKS = """\

## All benchmarks

Each runs from the repository's root and prints its figures; `--out FILE` keeps them as JSON, `--help` lists the rest.

"""


def page(kept: KeptResults | None = None) -> str:
    """The page of the docs: the chosen rows."""
    kept = kept or KeptResults()
    rows = {row.what: row for row in [*cpu_rows(kept), *gpu_rows(kept)]}
    chosen = [rows[what] for what in CHOSEN]
    return "".join([MADE, HEAD, *_tables(kept, chosen, ""), LEARNING])


def whole_page(kept: KeptResults | None = None) -> str:
    """The page beside the benchmarks: every row, and every benchmark."""
    kept = kept or KeptResults()
    rows = [*cpu_rows(kept), *gpu_rows(kept)]
    return "".join([MADE, ALL_HEAD, *_tables(kept, rows, "../docs/"), BENCHMARKS, *_benchmark_list()])


def _tables(kept: KeptResults, rows: Sequence[Row], docs: str) -> Iterator[str]:
    """The CPU's table and the GPUs', which have a column a device."""
    yield CPU
    yield from _table(("what", "figure", "target", "command"), [row for row in rows if len(row.figures) == 1])
    yield GPU.format(versions=_versions(kept), docs=docs)
    gpu = [row for row in rows if len(row.figures) == len(GPUS)]
    yield from _table(("what", "H100", "H200", "target", "command"), gpu)


def benchmark_modules() -> list[str]:
    """The modules that one starts, by their dotted names."""
    folder = Path(__file__).parent
    paths = sorted([*folder.glob("*.py"), *folder.glob("*/*.py")])
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in paths
        if path.stem not in NOT_BENCHMARKS
    ]


def _table(headings: Sequence[str], rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |\n|{' --- |' * len(headings)}\n"
    for row in rows:
        cells = (row.what, *row.figures, row.target, f"`{row.command}`")
        yield f"| {' | '.join(cells)} |\n"


def _versions(kept: KeptResults) -> str:
    versions = kept.get("h200", "rollout")["versions"]
    names = {
        "torch": "torch",
        "sglang": "SGLang",
        "megatron-core": "megatron-core",
        "ray": "Ray",
        "prefect": "Prefect",
    }
    return ", ".join(f"{shown} {versions[name]}" for name, shown in names.items())


def _benchmark_list() -> Iterator[str]:
    """A line a benchmark: its command and the first line of its docstring."""
    for module in benchmark_modules():
        tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))
        purpose = (ast.get_docstring(tree) or "").splitlines()[0]
        yield f"- `python -m {module}`: {purpose}\n"


def main() -> None:
    """Write the pages, or with --check say whether they are current."""
    pages = {PAGE: page(), ALL: whole_page()}
    if "--check" in sys.argv[1:]:
        old = [path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]
        sys.exit(f"{old[0]} is not current: run python -m benchmarks.page" if old else 0)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
