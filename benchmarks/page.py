"""docs/performance.md, made from kept results: `python -m benchmarks.page` writes it, `--check` says if it is current."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.figures.rows import Row, cpu_rows, gpu_rows
from benchmarks.kept import KeptResults

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
NOT_BENCHMARKS = {
    "__init__",
    "engines",
    "generating",
    "shards",
    "batch_rows",
    "rows",
    "tails",
    "kept",
    "killed_driver",
    "page",
    "shapes",
    "stored_iterations",
}

HEAD = """\
<!-- Made by `python -m benchmarks.page` from benchmarks/results; edit those files or benchmarks/figures. -->

# Performance

For people who want to know how fast millrace is. Each row names the command that measures it again.

A figure comes from the newest comparable run kept in [benchmarks/results](../benchmarks/results), one file a benchmark and device.
An empty cell was not measured. What limits a figure, and what was tried, stands by date in [benchmarks/LOG.md](../benchmarks/LOG.md).

"""
CPU = """\
## On a CPU

Two cores of a shared x86-64 server. Its speed varies by half from minute to minute, so ratios are of one run each.

"""
GPU = """\
## On GPUs

One NVIDIA H100 (80 GB) or H200 (141 GB), which SGLang and Megatron share. {versions}.
Weights are random except in the learning rows; shapes are those of Qwen3. [gpus.md](gpus.md) says how to set up a GPU.

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
    """The whole page."""
    kept = kept or KeptResults()
    return "".join(
        [
            HEAD,
            CPU,
            *_table(("what", "figure", "target", "command"), cpu_rows(kept)),
            "\n",
            GPU.format(versions=_versions(kept)),
            *_table(("what", "H100", "H200", "target", "command"), gpu_rows(kept)),
            LEARNING,
            BENCHMARKS,
            *_benchmark_list(),
        ]
    )


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
    """Write the page, or with --check say whether it is current."""
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        sys.exit(0 if current else f"{PAGE} is not current: run python -m benchmarks.page")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
