"""The quickstart: a tiny model made on the spot, warmed up, then trained by GRPO on arithmetic it can verify.

Owns the data, the two configurations and what is shown at the end; everything else is what any run uses.
"""

from __future__ import annotations

import asyncio
import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from connectors.storage.run_folder import RunFolder
from connectors.storage.store import Store
from core.config import RunConfig
from core.config.load import load_config

HELD_OUT = 200
LARGEST = 49  # both terms are 0..49: 2,500 problems


def run_quickstart(root: str, seed: int, iterations: int | None, name: str | None, console: Console) -> None:
    """Make model and data, warm up, train, and print what was learnt. Run again it goes on or only shows."""
    from connectors.mlflow.tracker import ui_command
    from flows.server import ensure_server, ui_url

    started = time.perf_counter()
    name = name or f"quickstart-{seed}"
    page = ui_url(ensure_server())
    console.print(f"[bold]1/4[/] Prefect answers at {page}")
    folder = prepare(Path(root) if "://" not in root else Path("quickstart-data"), seed)
    console.print(f"[bold]2/4[/] model and prompts are in {folder}")

    from flows.sft import sft
    from flows.train import train

    warm = warm_config(root, seed, name, folder)
    asyncio.run(sft(warm))
    console.print(
        f"[bold]3/4[/] warmed up by {warm.run.iterations * warm.steps_per_iteration} supervised steps"
    )
    model = fetch_export(root, warm, folder)
    config = grpo_config(root, seed, name, model, folder, iterations)
    console.print(f"[bold]4/4[/] GRPO: {config.run.iterations} iterations; watch {page} (flow run {name})")
    asyncio.run(train(config))

    run = RunFolder(root, name)
    points = held_out_accuracy(run)
    show(console, run, points)
    console.print(f"Prefect: {page}    MLflow: {ui_command(config.tracking.uri)}")
    longer = 2 * config.run.iterations
    console.print(f"Longer:  millrace quickstart --seed {seed} --iterations {longer} --name {name}-longer")
    before, after = points[min(points)], points[max(points)]
    seconds = time.perf_counter() - started
    print(f"quickstart: accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s (seed {seed})")


def prepare(base: Path, seed: int) -> Path:
    """Write model, tokenizer and problems under `base`/quickstart-files-SEED unless they are there already."""
    from connectors.huggingface.tiny import build_tiny_model

    folder = (base / f"quickstart-files-{seed}").resolve()
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        build_tiny_model(folder / "model", seed=seed)
        problems = arithmetic(seed)
        for file, rows in (("held_out", problems[:HELD_OUT]), ("train", problems[HELD_OUT:])):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "complete").write_text("")
    return folder


def arithmetic(seed: int) -> list[dict[str, str]]:
    """Distinct two-term sums with their answers, in an order that follows from the seed."""
    import random

    problems = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(problems)
    return [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in problems]


def recipe(name: str) -> str:
    """Path of a recipe that ships with the flows."""
    return str(resources.files("flows") / "recipes" / f"{name}.yaml")


def warm_config(root: str, seed: int, name: str, folder: Path) -> RunConfig:
    """The supervised warm start."""
    return load_config(
        recipe("quickstart_sft"),
        [
            f"run.name={name}-warm-up",
            f"run.seed={seed}",
            f"storage.root={root}",
            f"model.path={folder / 'model'}",
            f"data.sources.0.path={folder / 'train.jsonl'}",
        ],
    )


def grpo_config(
    root: str, seed: int, name: str, model: Path, folder: Path, iterations: int | None
) -> RunConfig:
    """The GRPO run."""
    overrides = [
        f"run.name={name}",
        f"run.seed={seed}",
        f"storage.root={root}",
        f"model.path={model}",
        f"data.sources.0.path={folder / 'train.jsonl'}",
        f"evaluation.sets.0.path={folder / 'held_out.jsonl'}",
    ]
    return load_config(
        recipe("quickstart"), [*overrides, *([f"run.iterations={iterations}"] if iterations else [])]
    )


def fetch_export(root: str, warm: RunConfig, folder: Path) -> Path:
    """The warmed-up model as a local folder."""
    target = folder / "warm-model"
    if not target.exists():
        partial = folder / "warm-model.partial"
        Store(root).download_dir(f"{warm.run.name}/exports/{warm.run.iterations:06d}", str(partial))
        partial.rename(target)
    return target


def held_out_accuracy(run: RunFolder) -> dict[int, float]:
    """Held-out accuracy by iterations trained, from the evaluation tables."""
    points: dict[int, float] = {}
    for path in run.store.list("eval/held_out"):
        table: Any = run.store.read_table(path, "evaluations", columns=["reward"])
        rewards = table.column("reward").to_pylist()
        points[int(Path(path).stem)] = sum(reward or 0.0 for reward in rewards) / len(rewards)
    return points


def show(console: Console, run: RunFolder, points: dict[int, float]) -> None:
    """Print the held-out curve as a table and keep it as a plot in the run folder."""
    from matplotlib.figure import Figure

    table = Table("iterations", "held-out accuracy", "", title="what it learnt")
    for done, accuracy in sorted(points.items()):
        table.add_row(str(done), f"{accuracy:.3f}", "█" * round(40 * accuracy))
    console.print(table)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="iterations", ylabel="held-out accuracy", ylim=(0, 1))
    axes.plot(sorted(points), [points[done] for done in sorted(points)], "o-")
    axes.grid(alpha=0.3)
    import io

    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    run.store.write("accuracy.png", data.getvalue())
    console.print(f"plot: {run.store.url_of('accuracy.png')}")
