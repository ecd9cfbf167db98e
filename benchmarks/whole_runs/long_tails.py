"""Iterations whose answers are of very different lengths, in each mode of the pipeline, beside the plain loop.

    python -m benchmarks.whole_runs.long_tails [--modes sync partial] [--iterations 10]                        # a tiny model on CPU
    python -m benchmarks.whole_runs.long_tails --shape 1.7b --median 600 --longest 8192 [--gpus 2]   # trainer and engines share them
    python -m benchmarks.whole_runs.long_tails --shape 1.7b --median 600 --longest 8192 --apart      # a GPU for each
    python -m benchmarks.whole_runs.long_tails --shape 1.7b --median 600 --longest 8192 --apart 2+2  # two for each
    python -m benchmarks.whole_runs.long_tails --shape 1.7b --median 600 --longest 8192 --modes apart eager   # the same, plain and eager
    python -m benchmarks.whole_runs.long_tails --kill [--flush-tokens 128]   # and what a kill -9 of the driver loses

Lengths are lognormal (--median, --sigma, --longest), one of a prompt, and the same prompts in the same order for every mode: as
many as the iterations that count train in turns, drawn again and again.
Weights are random, so that answers run to their length. On CPU engines and trainer are apart, one process each. Where they
share GPUs, the modes that run ahead are left out. The modes `apart` (plain) and `eager` have a GPU for each side if nothing else is said.

Figures are means over the iterations after the second: seconds, samples and trained tokens a second, the mean length that was
trained and its 99th percentile beside those of the draw, the share of trained tokens by age in weight versions, tokens that
were cut and not used, and how busy each GPU was. Where sync is among the modes, `planned_iteration_s` is what
`millrace plan --from sync` says of each. With --kill the driver is killed half-way through the rollout of the iteration after, and the
run started again until that one is whole: `kill` has the tokens that engines had of unfinished answers, those of them that
were stored, and those that were lost. JSON to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.end_to_end import Busy, until_whole
from benchmarks.gpu.shapes import SGLANG, command_line, configuration, device_name, laid_over, versions
from benchmarks.gpu.shapes import model_folder as shape_folder
from benchmarks.whole_runs.killed_driver import EmbeddedEngines, SGLangEngines, kill_within_rollout, lost
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.flows.commands.plan import plan_from
from tests.support.ctrl_c import heed_ctrl_c

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "partial": {"select": "finish"},
    "ahead": {"ahead": 1},
    "both": {"ahead": 1, "select": "finish"},
    "apart": {},
    "eager": {"eager": True},
}
APART = ("apart", "eager")
WARM_UP = 2


def main() -> None:
    """Run each mode, read what it stored, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=None)
    parser.add_argument("--shape", help="of the model, on a GPU; a tiny model on CPU when not given")
    parser.add_argument("--gpus", type=int, default=1, help="that trainer and engines share")
    parser.add_argument(
        "--apart",
        nargs="?",
        const="1+1",
        type=_counts,
        metavar="N+M",
        help="N GPUs train and M generate, instead; one each by itself",
    )
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--median", type=int, default=60, help="length of an answer, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm")
    parser.add_argument("--longest", type=int, default=800)
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory for the engine")
    parser.add_argument("--staleness", type=int, default=3, help="`max_staleness` of partial and both")
    parser.add_argument("--reserve", type=float, default=0.5, help="`reserve` of partial and both")
    parser.add_argument(
        "--eager-groups", type=int, help="groups of a chunk of eager; an eighth when not given"
    )
    parser.add_argument("--kill", action="store_true", help="the driver of each mode's run, at its end")
    parser.add_argument(
        "--flush-tokens", type=int, help="`rollout.flush_tokens`: answers are stored as they go"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=Path, default=None, help="where model folders are kept")
    parser.add_argument("--folder", type=Path, help="a new folder that keeps the runs")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    heed_ctrl_c()  # by which runs are ended
    shared = options.shape and not options.apart
    plain_modes = [name for name in MODES if name not in APART and not (shared and "ahead" in MODES[name])]
    modes = options.modes or plain_modes
    report: dict[str, Any] = {"command": command_line(), "modes": {}}
    if options.shape:
        report |= {"device": device_name(), "versions": versions()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        models = options.models or folder
        if options.shape:
            model = shape_folder(options.shape, models / options.shape)
        else:  # with so many tokens the one that ends an answer is rarely drawn
            model = build_tiny_model(folder / "model", vocab_size=16384, max_positions=4096)
        (folder / "prompts.jsonl").write_text(_rows(options))
        for mode in modes:
            report["modes"][mode] = _measured(options, model, folder, mode)
            if "sync" in report["modes"]:
                report["modes"][mode]["planned_iteration_s"] = _planned(options, model, folder, mode)
            if options.out:
                options.out.write_text(json.dumps(report, indent=1) + "\n")
    for base in ("sync", "apart"):
        plain = report["modes"].get(base)
        for figures in report["modes"].values() if plain else ():
            figures[f"times_{base}"] = round(figures["trained_tokens_s"] / plain["trained_tokens_s"], 3)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def _counts(text: str) -> tuple[int, int]:
    """How many GPUs train and how many generate."""
    trainers, _, generators = text.partition("+")
    return int(trainers), int(generators)


def _apart(options: argparse.Namespace, mode: str) -> tuple[int, int] | None:
    """GPUs that train and that generate; None where both share them."""
    apart: tuple[int, int] | None = options.apart or ((1, 1) if mode in APART else None)
    return apart


def _lengths(options: argparse.Namespace, count: int) -> list[int]:
    draw, middle = random.Random(options.seed), float(options.median)
    return [
        max(4, min(options.longest, round(middle * draw.lognormvariate(0, options.sigma))))
        for _ in range(count)
    ]


def _turn(options: argparse.Namespace) -> int:
    """Prompts of the iterations that count: they are drawn again and again, so that each mode has the same lengths in them."""
    return int(options.prompts * (options.iterations - WARM_UP))


def _rows(options: argparse.Namespace) -> str:
    """Prompts, each with the length of its answers, as JSON lines."""
    return "".join(
        json.dumps(
            {"prompt": f"{number}+{number}=", "label": "0", "sampling": {"max_new_tokens": length}},
        )
        + "\n"
        for number, length in enumerate(_lengths(options, _turn(options)))
    )


def _settings(options: argparse.Namespace, model: Path, folder: Path, mode: str) -> dict[str, Any]:
    count = options.prompts * options.group
    pack = max(16384 if options.shape else 2048, options.longest + 64)
    cut = {"max_staleness": options.staleness, "reserve": options.reserve}
    deferred = cut if "select" in MODES[mode] else {}
    chunks = {"eager_groups": options.eager_groups} if "eager" in MODES[mode] else {}
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": mode, "iterations": options.iterations + 100},  # ended before
        "data": {
            "sources": [
                {"name": "tails", "path": str(folder / "prompts.jsonl"), "sampling_key": "sampling"},
            ],
            "max_prompt_tokens": 64,
            "shuffle": False,
        },
        "rollout": {
            "prompts": options.prompts,
            "samples_per_prompt": options.group,
            "max_concurrency": round((1.5 + options.reserve) * count),
            "part_groups": 4,
            "flush_tokens": options.flush_tokens,
            "sampling": {"max_new_tokens": options.longest},
        },
        "algorithm": {"preset": "grpo", "correction": {"kind": "truncate"}},
        "pipeline": {**MODES[mode], **deferred, **chunks},
        "trainer": {"max_pack_tokens": pack, "global_batch": count},
        "checkpoint": {"every": 10_000},
    }
    if options.shape:
        apart = _apart(options, mode)
        trainers, generators = apart or (options.gpus, options.gpus)
        engines = {
            "sglang": {**SGLANG, "mem_fraction_static": options.memory, "cuda_graph_max_bs_decode": 384},
            "count": generators,
        }
        layout = {**settings, "engines": engines, "placement": {"colocate": not apart}}
        layout["trainer"] = {**settings["trainer"], "world_size": trainers}
        return laid_over(configuration(model, folder), layout)
    alone = {"model": {"path": str(model)}, "storage": {"root": str(folder / "runs")}}
    return {**alone, **settings, "reward": {"function": "benchmarks.gpu.shapes:coin"}}


def _planned(options: argparse.Namespace, model: Path, folder: Path, mode: str) -> float:
    """Seconds an iteration of the mode, by a replay of what the run `sync` recorded."""
    config = RunConfig.model_validate(_settings(options, model, folder, mode))
    listing = plan_from(config, str(folder / "runs"), "sync").listing
    p, shared = config.pipeline, config.placement.colocate
    trainers, generators = _apart(options, mode) or (1, 1)  # on CPU one process each
    gpus, layout = (
        (options.gpus, "colocated") if shared else (trainers + generators, f"{generators} + {trainers}")
    )
    wanted = (gpus, layout, p.ahead, p.staleness, p.select)
    found = [row[len(wanted)] for row in listing.rows if tuple(row[: len(wanted)]) == wanted]
    return float(found[0])


def _measured(options: argparse.Namespace, model: Path, folder: Path, mode: str) -> dict[str, Any]:
    (folder / f"{mode}.yaml").write_text(yaml.safe_dump(_settings(options, model, folder, mode)))
    millrace = [sys.executable, "-m", "millrace.flows.commands"]
    environment = {**os.environ, "MILLRACE_HOME": str(folder / "home"), "PYTHONPATH": with_this_folder()}
    run = RunFolder(str(folder / "runs"), mode)
    with contextlib.ExitStack() as stack:
        apart = _apart(options, mode)
        gpus = sum(apart) if apart else options.gpus
        busy = stack.enter_context(Busy(gpus)) if options.shape else None
        try:
            command = [*millrace, "train", f"{mode}.yaml"]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr)
            until_whole(process, run, options.iterations - 1)
            figures = _figures(options, run, busy)
            if options.kill:
                root = str(folder / "runs")
                engines = SGLangEngines(root, mode) if options.shape else EmbeddedEngines(model)
                held = kill_within_rollout(process, engines, figures["rollout_s"] / 2)
                ahead = MODES[mode].get("ahead", 0)
                figures["kill"] = lost(run, options.iterations, options.iterations + ahead, held)
                process = subprocess.Popen(command, cwd=folder, env=environment, stdout=sys.stderr)
                until_whole(process, run, options.iterations)
            process.send_signal(signal.SIGINT)  # its last iteration would save a checkpoint
            process.wait(timeout=120)
        finally:
            subprocess.run(
                [*millrace, "server", "stop"], cwd=folder, env=environment, check=False, stdout=sys.stderr
            )
    return figures


def with_this_folder() -> str:
    """The module search path with the repository, which has the reward."""
    return os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])


def _figures(options: argparse.Namespace, run: RunFolder, busy: Busy | None) -> dict[str, Any]:
    manifests = [run.manifest(index) for index in range(options.iterations)]
    times = [manifest.tasks["committed"] for manifest in manifests if manifest]
    metrics = [manifest.tasks["metrics"] for manifest in manifests[WARM_UP:] if manifest]
    seconds = times[-1] - times[WARM_UP - 1]
    lengths = [
        length
        for index in range(WARM_UP, options.iterations)
        for length in run.iteration(index)
        .read_table("batch.parquet", "batch", columns=["response_length"])["response_length"]
        .to_pylist()
    ]
    drawn = sorted(_lengths(options, _turn(options)))
    ages = sorted({name for row in metrics for name in row if name.startswith("train/share_age_")})
    return {
        "iteration_s": round(seconds / len(metrics), 3),
        "each_s": [round(after - before, 2) for before, after in zip(times, times[1:], strict=False)],
        "samples_s": round(len(lengths) / seconds, 2),
        "trained_tokens_s": round(sum(lengths) / seconds, 1),
        "trained_length": {"mean": round(sum(lengths) / len(lengths), 1), "p99": _p99(sorted(lengths))},
        "drawn_length": {"mean": round(sum(drawn) / len(drawn), 1), "p99": _p99(drawn)},
        "rollout_s": _mean(metrics, "time/rollout_s"),
        "train_step_s": _mean(metrics, "time/train_step_s"),
        "eager_s": _mean(metrics, "time/eager_s"),
        "share_by_age": {name.removeprefix("train/share_age_"): _mean(metrics, name) for name in ages},
        "ess": _mean(metrics, "train/ess"),
        "tokens_returned": _mean(metrics, "tokens/returned"),
        **({"gpu_busy": busy.each(times[WARM_UP - 1], times[-1])} if busy else {}),
    }


def _p99(values: list[int]) -> int:
    return values[min(len(values) - 1, int(0.99 * len(values)))]


def _mean(metrics: list[dict[str, float]], name: str) -> float | None:
    """Mean of a metric over iterations; 0 where one lacks it, null where all do."""
    found = [row[name] for row in metrics if name in row]
    return round(sum(found) / len(metrics), 4) if found else None


if __name__ == "__main__":
    main()
