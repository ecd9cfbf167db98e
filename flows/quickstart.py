"""The quickstart: build a tiny model, warm it up, then train it by GRPO on sums whose answers can be verified.

Owns the files it makes, the configurations and the output at the end. It uses the same flows as every run.
"""

import asyncio
import io
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from rich.table import Table

from millrace.connectors.host.local_files import keep_fonts_at_home
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.plain_text import PlainConsole, write_line
from millrace.flows.driver.ending import ending

HELD_OUT = 200
LARGEST = 49  # both terms are 0..49: 2,500 sums
FILES = Path("quickstart-files")
WARM_LOSS = 0.55  # mean of the last ten steps; about a third of the samples are then right, with any seed
TEACHER_ITERATIONS = 12  # iterations of 5,120 rows each, after the warm-up's
GPU_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "layers": 8,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 128,
}
GPU_WARM_UP = [
    "model.dtype=bfloat16",
    "trainer.optimizer.lr=5.0e-4",
    "trainer.max_pack_tokens=16384",
    "trainer.deterministic=false",
]


def run_quickstart(
    root: str, seed: int, iterations: int | None, name: str | None, console: PlainConsole
) -> None:
    """Make model and data, warm up, train, and print the result. Called again, it resumes or only prints."""
    from millrace.connectors.prefect.server import ensure_server, login_hint, ui_url

    started = time.perf_counter()
    config = grpo_config(root, seed, name or f"quickstart-{seed}", iterations)
    with ThreadPoolExecutor(1) as pool:
        # its database is prepared while the model is made
        server = pool.submit(ensure_server)
        make_files(config)
        page = ui_url(server.result())
    console.print(f"1/3 Prefect answers at {page}{login_hint()}", soft_wrap=True)
    _warm_up(config, [])
    console.print(f"2/3 warmed-up model and prompts are in {FILES / f'seed-{seed}'}")

    from millrace.flows.train import train

    console.print(f"3/3 GRPO, {config.run.iterations} iterations; watch {page} (flow run {config.run.name})")
    asyncio.run(train(config))

    run = RunFolder(root, config.run.name)
    points = held_out_accuracy(run)
    show(console, run, points)
    longer = f"--iterations {2 * config.run.iterations} --name {config.run.name}-longer"
    more = [f"longer   millrace quickstart --seed {seed} {longer}", "stop     millrace server stop"]
    for line in [*ending(config), *more]:
        console.print(line, soft_wrap=True)
    before, after = points[min(points)], points[max(points)]
    seconds = time.perf_counter() - started
    write_line(
        f"quickstart: accuracy {before:.3f} -> {after:.3f} (seed {seed}); this start took {seconds:.0f} s"
    )


def prepare(config: RunConfig) -> None:
    """Write the sums, and make the warmed-up model at config.model.path unless it exists."""
    make_files(config)
    _warm_up(config, [])


def prepare_for_gpu(config: RunConfig) -> None:
    """`prepare` in bfloat16 with 25 million parameters and a head size of 64, which SGLang's kernels accept."""
    make_files(config, GPU_SHAPE)
    _warm_up(config, GPU_WARM_UP)


def make_files(config: RunConfig, shape: Mapping[str, Any] | None = None) -> None:
    """Sums and a model of random weights, unless there is a warmed-up one."""
    if is_warm(config):
        return
    from millrace.connectors.huggingface.tiny import build_tiny_model

    folder = Path(config.model.path).parent
    folder.mkdir(parents=True, exist_ok=True)
    problems = arithmetic(config.run.seed)
    for file, rows in (("held_out", problems[:HELD_OUT]), ("train", problems[HELD_OUT:])):
        write_rows(folder / f"{file}.jsonl", rows)
    build_tiny_model(folder / "model", seed=config.run.seed, **(shape or {}))


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a file with a JSON object a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _warm_up(config: RunConfig, overrides: Sequence[str]) -> None:
    if not is_warm(config):
        model = Path(config.model.path)
        learn_answers(warm_config(config, model.parent, overrides), model, WARM_LOSS)


def is_warm(config: RunConfig) -> bool:
    """Whether the warmed-up model at config.model.path exists."""
    return (Path(config.model.path) / "config.json").exists()


def prepare_with_teacher(config: RunConfig) -> None:
    """`prepare`, then make a teacher at config.algorithm.teacher: the warmed-up model, trained longer on answers."""
    prepare(config)
    assert config.algorithm.teacher is not None
    make_teacher(config, Path(config.algorithm.teacher))


def make_teacher(config: RunConfig, teacher: Path) -> None:
    """Make a teacher in this folder unless there is one: the warmed-up model, trained longer on answers."""
    if not (teacher / "config.json").exists():
        learn_answers(teacher_config(config), teacher)


def learn_answers(config: RunConfig, into: Path, target_loss: float = 0.0) -> None:
    """Train on reference answers and put a Hugging Face folder at `into`, whole or not at all.

    It is the export of the first iteration whose last ten steps have a mean loss of at most `target_loss`, else of the last.
    """
    from millrace.connectors.prefect.server import ensure_server

    ensure_server()  # in a script: Prefect would start a temporary one, and give up soon on a busy machine
    from millrace.flows.sft import sft

    asyncio.run(sft(config))
    run = RunFolder(config.storage.root, config.run.name)
    for done in range(1, config.run.iterations + 1):
        steps = run.iteration(done - 1).read_json("step.json")["steps"]
        if statistics.fmean(step["loss"] for step in steps[-10:]) <= target_loss:
            break
    export = run.store.child(f"exports/{done:06d}")
    partial = into.with_name(f"{into.name}.partial")
    export.download_dir("", str(partial))
    partial.rename(into)


def arithmetic(seed: int) -> list[dict[str, str]]:
    """Every two-term sum with its answer, shuffled by the seed."""
    problems = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(problems)
    return [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in problems]


def recipe(name: str) -> str:
    """Path of a recipe that ships with millrace."""
    return str(resources.files("millrace.deployments") / "recipes" / f"{name}.yaml")


def warm_config(config: RunConfig, folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The supervised warm-up. Its run folder is among the quickstart's files."""
    return load_config(
        recipe("quickstart_warm_up"),
        [
            f"run.name=warm-up-{config.run.seed}",
            f"run.seed={config.run.seed}",
            f"storage.root={folder / 'runs'}",
            f"model.path={folder / 'model'}",
            f"data.sources.0.path={folder / 'train.jsonl'}",
            *overrides,
        ],
    )


def teacher_config(config: RunConfig) -> RunConfig:
    """The supervised run that continues from the warm-up, long enough for a teacher worth distilling."""
    folder = Path(config.model.path).parent
    return load_config(
        recipe("quickstart_warm_up"),
        [
            f"run.name=teacher-{config.run.seed}",
            f"run.seed={config.run.seed}",
            f"run.iterations={TEACHER_ITERATIONS}",
            f"storage.root={folder / 'runs'}",
            f"model.path={config.model.path}",
            f"data.sources.0.path={folder / 'train.jsonl'}",
            f"checkpoint.export_every={TEACHER_ITERATIONS}",
        ],
    )


def grpo_config(root: str, seed: int, name: str, iterations: int | None) -> RunConfig:
    """The GRPO run."""
    folder = FILES / f"seed-{seed}"
    overrides = [
        f"run.name={name}",
        f"run.seed={seed}",
        f"storage.root={root}",
        f"model.path={folder / 'warm-model'}",
        f"data.sources.0.path={folder / 'train.jsonl'}",
        f"evaluation.sets.0.path={folder / 'held_out.jsonl'}",
    ]
    return load_config(
        recipe("quickstart"), [*overrides, *([f"run.iterations={iterations}"] if iterations else [])]
    )


def held_out_accuracy(run: RunFolder) -> dict[int, float]:
    """Held-out accuracy by number of trained iterations, from the evaluation tables."""
    points: dict[int, float] = {}
    for path in run.store.list("eval/held_out"):
        table: Any = run.store.read_table(path, "evaluations", columns=["reward"])
        rewards = table.column("reward").to_pylist()
        points[int(Path(path).stem)] = sum(reward or 0.0 for reward in rewards) / len(rewards)
    return points


def show(console: PlainConsole, run: RunFolder, points: dict[int, float]) -> None:
    """Print the held-out curve as a table and keep it as a plot in the run folder."""
    keep_fonts_at_home()
    from matplotlib.figure import Figure

    table = Table("iterations", "held-out accuracy", "", title="what it learnt")
    for done, accuracy in sorted(points.items()):
        table.add_row(str(done), f"{accuracy:.3f}", "█" * round(40 * accuracy))
    console.print(table)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="iterations", ylabel="held-out accuracy", ylim=(0, 1))
    axes.plot(sorted(points), [points[done] for done in sorted(points)], "o-")
    axes.grid(alpha=0.3)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    run.store.write("accuracy.png", data.getvalue())
    console.print(f"plot: {run.store.url_of('accuracy.png')}", soft_wrap=True)
