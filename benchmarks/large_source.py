"""How soon a source of a million rows gives its first prompts, and what it costs the driver.

    python -m benchmarks.large_source [--rows 1000000] [--format jsonl parquet] [--out FILE]

Each measurement is a process of its own: it opens the source as a run does, draws an iteration's prompts by the ledger, and
reads and tokenises them. Beside it the same with a source read whole, as smaller ones are: of a tenth of the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

TENTH = 10
COMMAND = "python -m benchmarks.large_source"
DRAWN = 512  # prompts of an iteration, the reserve included


def main() -> None:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", nargs="+", default=["jsonl", "parquet"])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--measure", nargs=2, metavar=("FILE", "ABOVE_ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], int(options.measure[1]))
        return
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.format:
            for how, rows, above in (
                ("as drawn", options.rows, 0),
                ("whole", options.rows // TENTH, options.rows),
            ):
                path = write(Path(folder) / f"{above}.{name}", rows)
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.large_source",
                    "--measure",
                    str(path),
                    str(above),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
                found = figures[f"{name}, {how}"] = {"rows": rows, **json.loads(done.stdout)}
                print(
                    f"{rows:,} rows of {name} ({path.stat().st_size / 2**20:.0f} MiB), read {how}: first {DRAWN} prompts "
                    f"after {found['start_s']:.1f} s, {found['driver_mb']:.0f} MiB; the next {DRAWN} in {found['next_s']:.3f} s"
                )
    if options.out:
        options.out.write_text(json.dumps({"command": COMMAND, "sources": figures}, indent=1) + "\n")


def write(path: Path, rows: int) -> Path:
    """A file of made-up questions."""
    prompts = [
        f"Question {n}: Ann has {n % 97} pens and buys {n % 89}; how many has she now?" for n in range(rows)
    ]
    labels = [str(n % 97 + n % 89) for n in range(rows)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"prompt": prompts, "label": labels}), path)
        return path
    with path.open("w") as file:
        for prompt, label in zip(prompts, labels, strict=True):
            file.write(json.dumps({"prompt": prompt, "label": label, "metadata": {"level": 1}}) + "\n")
    return path


def measure(path: str, above: int) -> None:
    """Open a source and draw from it twice; prints the figures as JSON."""
    from millrace.connectors.huggingface.tiny import build_tokenizer
    from millrace.connectors.huggingface.tokenizer import PromptTokenizer
    from millrace.core.accounts.curriculum import source_and_level
    from millrace.core.accounts.ledger import Ledger
    from millrace.core.config import RunConfig
    from millrace.tasks.data.prompt_dataset import PromptDataset

    tokenizer = PromptTokenizer(build_tokenizer())
    tokenizer.encode_prompts(["1+1="], chat=False)
    config = RunConfig.model_validate(
        {
            "run": {"name": "large", "iterations": 1},
            "model": {"path": "-"},
            "data": {"sources": [{"path": path, "chat": False}], "stream_above_rows": above},
        }
    )
    process = psutil.Process()
    before, started = process.memory_info().rss, time.perf_counter()
    dataset = PromptDataset(config, tokenizer)
    dataset.fingerprints()
    ledger = Ledger(0, dataset.plans())

    def draw(first: int) -> None:
        draws = ledger.draw(0, first + DRAWN)[first:]
        dataset.read([(*source_and_level(draw.source), draw.row) for draw in draws])

    draw(0)
    start, held = time.perf_counter() - started, process.memory_info().rss - before
    started = time.perf_counter()
    draw(DRAWN)
    figures = {"start_s": start, "driver_mb": held / 2**20, "next_s": time.perf_counter() - started}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
