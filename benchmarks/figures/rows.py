"""The rows of benchmarks/README.md, some of them in docs/performance.md: each takes its figures from kept results and names the command that measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.figures.tails import long_tail_rows
from benchmarks.kept import KeptResults

GPUS = ("h100", "h200")
SYNC_TARGETS = {"0.6b": "< 0.15 s", "1.7b": "", "4b": "< 0.6 s"}
END_TO_END = "from engines' answers to batch.parquet and one rank's packs"
PARTS = ("generation", "training", "memory", "sync", "orchestration")


@dataclass(frozen=True)
class Row:
    """What was measured, on which devices, the target and the command."""

    what: str
    figures: tuple[str, ...]  # one a device, in the order of the table's columns
    target: str
    command: str


def cpu_rows(kept: KeptResults) -> Iterator[Row]:
    """Rows of the CPU's table."""
    overhead = kept.get("cpu", "iteration_overhead")
    share = f"{overhead['overhead']:.2f} s of {overhead['iteration']:.1f} s; at most {overhead['overhead_max']:.2f} s"
    what = "an iteration's overhead: neither generation nor training nor sync"
    yield Row(what, (share,), "< 0.5 s", "python -m benchmarks.whole_runs.iteration_overhead --iterations 16")
    engine = kept.get("cpu", "embedded_engine")
    ratio = f"{engine['ratio']:.1f} times; {engine['ratio_on_busy_cores']:.1f} on busy cores"
    what = "embedded engine, 64 requests at once, against one `generate` after the other"
    yield Row(what, (ratio,), "≥ 5", "python -m benchmarks.embedded_engine")
    sessions = kept.get("cpu", "sessions")
    what = f"engine busy in {sessions['rollouts']} rollouts of {sessions['turns']} turns with calls of {sessions['wait']:g} s"
    busy = f"{sessions['busy_ratio']:.2f} of what single answers keep it"
    yield Row(what, (busy,), "≥ 0.9", sessions["command"])
    what = "single answers through a session, time against those without one"
    yield Row(what, (f"{sessions['single_ratio']:.2f} times",), "≤ 1.05", sessions["command"])
    for case in kept.get("cpu", "trainer_step"):
        what = f"trainer's step against plain Hugging Face and AdamW, {case['case']} batch"
        command = "python -m benchmarks.trainer_step --threads 2"
        yield Row(what, (f"{case['ratio']:.2f} times its time",), "≤ 1.3", command)
    for name, source in kept.get("cpu", "large_source")["sources"].items():
        what = f"first 512 prompts of a source of {source['rows']:,} rows ({name}): driver's memory more"
        target = "< 5 s, < 500 MiB" if name.endswith("as drawn") else ""
        figure = f"{source['start_s']:.1f} s, {source['driver_mb']:.0f} MiB"
        yield Row(what, (figure,), target, "python -m benchmarks.large_source")
    yield from _data_plane_rows(kept.get("cpu", "data_plane"))
    yield from _large_iteration_rows(kept.get("cpu", "data_plane_64m"))
    yield from _shard_rows(kept.get("cpu", "data_plane_shards"))
    yield from _scale_rows(kept.get("cpu", "scale"))
    conversion = kept.get("cpu", "conversion")
    for way in ("hf to torch_dist", "torch_dist to hf"):
        what = f"peak memory of converting {conversion['bytes'] / 2**30:.1f} GiB of weights, {way}"
        figure = f"{conversion[way]['of_share']:.2f} of a rank's share at tp 2 × pp 2"
        yield Row(what, (figure,), f"≤ {conversion['target']}", conversion["command"])
    check = kept.get("cpu", "check_command")
    seconds = f"{check['fastest_s']:.1f} to {check['slowest_s']:.1f} s"
    yield Row("`millrace check`, start to answer", (seconds,), "< 3 s", "python -m benchmarks.check_command")
    for run in kept.get("cpu", "quickstart")["seeds"]:
        learnt = f"{run['before']:.2f} → {run['after']:.2f} in {run['seconds']} s"
        command = f"millrace quickstart --seed {run['seed']}"
        yield Row(
            f"quickstart, held-out accuracy, seed {run['seed']}", (learnt,), "+ 0.30 in < 300 s", command
        )
    presets = {name: mean(run["after"] for run in runs) for name, runs in kept.get("cpu", "presets").items()}
    learnt = f"{min(presets.values()):.2f} to {max(presets.values()):.2f} ([each](../docs/algorithms.md))"
    what = "held-out reward of the presets' recipes after 50 iterations, means of three seeds"
    yield Row(what, (learnt,), "", "python -m benchmarks.presets --seed 0")
    yield from _mode_rows(kept.get("cpu", "learning_by_mode"))
    for case in kept.get("cpu", "recovery_time")[1::2]:
        what = f"everything killed, replay of {case['iterations replayed']}: until the run works again"
        yield Row(
            what,
            (f"{case['ready']:.0f} s",),
            "",
            "python -m benchmarks.whole_runs.recovery_time --replay 1 4",
        )
    points = kept.get("cpu", "soak_matrix")
    held = sum(not point["problems"] for point in points)
    yield Row(
        "kill matrix: points that hold", (f"{held} of {len(points)}",), "all", "python -m tests.soak --matrix"
    )
    for case in kept.get("cpu", "pack_balance"):
        slowest = f"{case['by_operations']['mean']:.3f} (by tokens {case['by_tokens']['mean']:.3f})"
        what = f"slowest rank's work over the mean, {case['ranks']} ranks, packs of {case['max_pack_tokens']:,} tokens"
        yield Row(what, (slowest,), "", "python -m benchmarks.pack_balance")
    yield from _gap_rows(kept.get("cpu", "logprob_gap")["cases"])
    for case in kept.get("cpu", "graded_answers"):
        what = f"mathematical answers graded a second by one process, {case['kind']}"
        yield Row(what, (f"{case['answers_per_s']:,}",), "", "python -m benchmarks.rewards.graded_answers")
    scoring = kept.get("cpu", "scoring_overhead")
    what = f"{scoring['answers']:,} mathematical answers scored by a run's worker, time against plain calls of math-verify"
    yield Row(what, (f"{scoring['ratio']:.2f} times",), "≤ 1.2", scoring["command"])
    learning = kept.get("cpu", "learning")
    what = "learning of the one-GPU recipe on a CPU, held-out accuracy"
    yield Row(what, (_held_out(learning["curve"]["held_out"]),), "rising", learning["command"])


def _gap_rows(cases: list[dict[str, Any]]) -> Iterator[Row]:
    """Of engines that are right the largest difference, and of wrong ones how many are refused, by type."""
    for dtype in dict.fromkeys(case["dtype"] for case in cases):
        of_type = [case for case in cases if case["dtype"] == dtype]
        right = [case for case in of_type if case["state"].startswith("right")]
        refused = sum(case["refused"] for case in of_type if case not in right)
        largest = max(case["ratio"] for case in right)
        what = f"engines that are right, largest difference from the trainer in rounding floors, {dtype}"
        yield Row(what, (f"{largest:.2f}",), "≤ 3", "python -m benchmarks.logprob_gap")
        what = f"engines that are wrong and refused, {dtype}"
        yield Row(
            what, (f"{refused} of {len(of_type) - len(right)}",), "", "python -m benchmarks.logprob_gap"
        )


def _data_plane_rows(result: Any) -> Iterator[Row]:
    command, paired = result["command"], result["paired"]
    yield _stage_row(result, "end_to_end", END_TO_END, "≥ 2 million")
    yield _stage_row(result, "generate", "the first part of it: requests, answers, rollout parts")
    yield _stage_row(result, "batch", "the second: rollout parts to batch.parquet")
    yield _stage_row(result, "packs", "the third: batch.parquet to packs")
    times = f"{paired['ratio']:.1f} times as fast"
    yield Row(
        "an answer's JSON to a table of rows, against Python objects for each token", (times,), "", command
    )
    yield _block_row(result)


def _large_iteration_rows(result: Any) -> Iterator[Row]:
    yield _stage_row(result, "end_to_end", END_TO_END, "≥ 2 million")
    yield _block_row(result)
    peak = f"{result['driver_mib']['peak']:.0f} MiB"
    yield Row(f"the driver's memory at most, {_size(result)}", (peak,), "< 2 GB", result["command"])


def _stage_row(result: Any, stage: str, what: str, target: str = "") -> Row:
    rate = f"{result['stages'][stage]['tokens_per_cpu_s'] / 1e6:.1f} million tokens a second of CPU"
    return Row(f"{what}, {_size(result)}", (rate,), target, result["command"])


def _block_row(result: Any) -> Row:
    longest = result["longest_block_s"]
    blocked = (
        f"{longest['wall'] * 1000:.0f} ms by the clock, {longest['cpu'] * 1000:.0f} ms of its own CPU time"
    )
    what = f"longest block of the event loop meanwhile, {_size(result)}"
    return Row(what, (blocked,), "< 50 ms", result["command"])


def _size(result: Any) -> str:
    return f"{result['samples']:,} × {result['tokens']:,} tokens"


def _shard_rows(result: Any) -> Iterator[Row]:
    """None where it was not measured: it needs a host with a core for every shard and engine."""
    for case in result["shards"] if result else ():
        what = f"requests, answers and rollout parts in {case['shards']} shards, {result['cores']} cores, by the clock"
        rate = f"{case['tokens_per_s'] / 1e6:.1f} million tokens a second, {case['speedup']:.1f} times one shard's"
        yield Row(what, (rate,), "linear", result["command"])


def _mode_rows(result: Any) -> Iterator[Row]:
    for mode, runs in result.items():
        after = [run["after"] for run in runs]
        learnt = f"{mean(run['before'] for run in runs):.2f} → {mean(after):.2f} ({min(after):.2f} to {max(after):.2f})"
        older = f"{mean(run['older_tokens'] for run in runs):.0%} of its tokens of older weights"
        what = f"held-out reward of `grpo` after {runs[0]['iterations']} iterations, mode {mode}, {older}; mean of {len(runs)} seeds"
        target = "" if mode == "sync" else "as sync, within its noise"
        yield Row(what, (learnt,), target, "python -m benchmarks.whole_runs.learning_by_mode")


def _scale_rows(result: Any) -> Iterator[Row]:
    few, many, command = result["few"], f"{result['iterations']:,}", result["command"]
    for name, what in (("start", "a start of a run"), ("show", "`millrace show`")):
        growth = f"{result[name]['growth']:.2f} times, {result[name]['long']['cpu_s']:.2f} s of CPU"
        yield Row(f"{what} of {many} iterations against one of {few}", (growth,), "≤ 2 times", command)
    cost, memory = result["writing"]["iteration_cpu_s"], result["writing"]["driver_mib"]
    flat = f"{cost['first'] * 1000:.0f} and {cost['last'] * 1000:.0f} ms of CPU, {memory['first']:.0f} and {memory['last']:.0f} MiB"
    what = f"the first and the last tenth of {many} iterations: what a driver records of each, and its memory"
    yield Row(what, (flat,), "flat", command)
    choice = result["choice"]
    what = f"the choice of one of {choice['engines']:,} engines, {choice['samples']:,} samples"
    yield Row(what, (f"{choice['us']:.1f} µs",), "", command)


def gpu_rows(kept: KeptResults) -> Iterator[Row]:
    """Rows of the GPUs' table."""

    def row(name: str, what: str, target: str, command: str, show: Callable[[Any], str | None]) -> Row:
        results = [kept.get(device, name) for device in GPUS]
        figures = tuple((show(result) or "") if result else "" for result in results)
        return Row(what, figures, target, command)

    for shape, target in SYNC_TARGETS.items():

        def sync(result: Any, shape: str = shape) -> str | None:
            return _sync(result, shape)

        command = f"python -m benchmarks.gpu.sync --shapes {shape}"
        yield row("sync", f"weight sync on one GPU, {shape.upper()}", target, command, sync)
    what = "rollout over raw SGLang, 0.6B, 256 × 512 tokens"
    yield row("rollout", what, "≥ 0.97", "python -m benchmarks.gpu.rollout --rounds 6", _rollout)
    command = "python -m benchmarks.gpu.rollout --rounds 3 --tokens 2048"
    yield row("rollout", "the same, 256 × 2,048 tokens", "≥ 0.97", command, _long_rollout)
    yield from _trainer_rows(row)
    yield from _iteration_rows(row)
    command = "millrace train deployments/recipes/one_gpu.yaml run.name=learn"
    what = "learning, 25M parameters, held-out accuracy"
    yield row("learning", what, "rising", command, lambda result: _held_out(result["curve"]["held_out"]))
    what = "log-prob gap of that run, mean and worst iteration"
    yield row("learning", what, "< 0.02", command, _gap)
    command = "millrace train deployments/recipes/smollm2_one_gpu.yaml run.iterations=30"
    what = "SmolLM2-135M on word problems, held-out accuracy: all weights by Megatron and by FSDP, adapters"
    yield row("smollm2_learning", what, "rising", command, _three_curves)
    command = "millrace train examples/geometry/geometry_vlm_one_gpu.yaml run.iterations=8"
    what = (
        "a tiny model that sees, 2,048 answers to 256 pictures by SGLang: a picture with each, log-prob gap"
    )
    yield row("pictures", what, "gap < its limit", command, _pictures)
    start = "python -m benchmarks.gpu.two_ways"
    for what, key, options in (
        (
            "context parallel 2: step with heads exchanged over keys gathered, 1 × 16,384 tokens",
            "context parallel, one sample of 16,384",
            "context --samples 1 --length 16384",
        ),
        (
            "the same, 8 × 2,048 tokens",
            "context parallel, eight samples of 2,048",
            "context --samples 8 --length 2048",
        ),
        (
            "data parallel 2, 1.7B: step with overlapped reduction over one afterwards",
            "gradients",
            "gradients --shape 1.7b --rounds 6",
        ),
    ):

        def ratio(result: Any, key: str = key) -> str:
            return f"{result[key]['ratio']:.2f}"

        yield row("two_ways", what, "", f"{start} {options}", ratio)
    yield from long_tail_rows(row)
    what = "checkpoint of 1.7B, 24 GB, written while the trainer goes on"
    command = "python -m benchmarks.gpu.checkpoint --shape 1.7b"
    yield row("checkpoint", what, "wait ≤ 2 s, ≥ 0.8 of dd", command, _checkpoint)
    yield row("tests", "tests that need a GPU", "pass", "python -m pytest tests/gpu", _tests)


def _trainer_rows(row: Callable[..., Row]) -> Iterator[Row]:
    cases = [("0.6b", 2048), ("0.6b", 8192), ("0.6b", 16384), ("0.6b", 0), ("1.7b", 2048), ("1.7b", 16384)]
    for shape, length in cases:
        batch = f"{16384 // length} × {length:,} tokens" if length else "mixed lengths"
        command = f"python -m benchmarks.gpu.trainer --shape {shape} --lengths {length}"

        def show(result: Any, shape: str = shape, length: int = length) -> str | None:
            return _step(result, shape, length)

        target = "MFU ≥ 40 %" if length else ""
        yield row("trainer", f"trainer's step, {shape.upper()}, {batch}", target, command, show)
    command = "python -m benchmarks.gpu.trainer --shape 30b-a3b-4"
    for what, part, target in (("trainer's step", "step", 25), ("their layers alone", "layers", 18)):

        def share(result: Any, part: str = part) -> str:
            grouped = result["experts"][f"grouped: {part}"]
            times = result["experts"][f"{part}: one by one / grouped"]
            rate = f"{grouped['tokens_per_second']:,.0f} tokens/s, MFU {grouped['share_of_peak']:.1%}"
            return f"{rate}, {times:.1f} times one expert after the other"

        size = f"{what}, 4 layers of 30B-A3B, 8 × 2,048 tokens"
        yield row("experts", size, f"MFU ≥ {target} %", command, share)
    what = "the same step, two expert parallel GPUs, 8 × 2,048 tokens each"
    yield row("expert_parallel", what, "MFU ≥ 20 %", f"{command} --ep 2", _parallel_experts)
    command = "python -m benchmarks.gpu.trainer --sides millrace fsdp --lengths 2048 --steps 8"
    yield row("fsdp", "FSDP's step over Megatron's, 0.6B", "≥ 0.8", command, _two_trainers)
    command = "python -m benchmarks.gpu.trainer --shape 4b --sides millrace fsdp --lengths 2048 --steps 3 --recompute full"
    yield row("fsdp_4b", "the same, 4B, computed again", "≥ 0.9", command, _two_trainers)
    command = "python -m benchmarks.gpu.trainer --shape 1.7b --lengths 2048 --offload 0,0.5,1"
    what = "step and GPU memory with 0, half and all of the optimizer on the host, 1.7B"
    yield row("offload", what, "", command, _offloads)
    command = "python -m benchmarks.gpu.adapters --shape 4b"
    what = "adapters of 4B: tokens/s over all weights', memory over the plan's, sync, longest wait amid syncs and at other times"
    yield row("adapters", what, "1.3, ≤ 1.1, ≤ 0.05 s", command, _adapters)
    what = "the first two with pairs added in one product, and seconds of an export"
    yield row("adapters_4b_step", what, "1.3, ≤ 1.1", command, _adapters_step)
    command = f"{command} --halves train --tokens 16384 --length 16384 --limit-gib 78 --steps 3"
    what = "adapters of 4B on samples of 16,384 tokens, PyTorch held to 78 GiB: tokens/s, and GPU memory used in all"
    yield row("adapters_4b_80gb", what, "≤ 79.6 GiB", command, _adapters_held)


def _parallel_experts(result: Any) -> str:
    whole = result["whole"]
    return f"{whole['tokens_per_second']:,.0f} tokens/s a GPU, MFU {whole['share_of_peak']:.1%}"


def _two_trainers(result: Any) -> str:
    rates = {(each["side"], each["length"]): each["tokens_per_second"] for each in result["results"]}
    lengths = sorted({length for _, length in rates})
    return ", ".join(
        f"{rates['fsdp', length] / rates['millrace', length]:.2f} at {length:,} tokens a sample"
        for length in lengths
    )


def _pictures(result: Any) -> str:
    rate = result["answers"] / result["rollout_s"]
    return f"{rate:.0f} a second, {result['logprob_gap_mean']:.4f} of {result['logprob_gap_limit']}"


def _offloads(result: Any) -> str:
    return ", ".join(
        f"{each['seconds'] * 1000:.0f} ms and {each['gpu_peak_gib']:.0f} GiB" for each in result["offload"]
    )


def _adapters(result: Any) -> str:
    train, serve = result["train"], result["serve"]
    waits = f"{serve['longest_wait_amid_syncs_s']:.2f} and {serve['longest_wait_s']:.2f} s"
    return f"{train['speed']:.2f}, {train['adapters']['held_over_planned']:.2f}, {serve['sync_s']:.2f} s, {waits}"


def _adapters_step(result: Any) -> str:
    train = result["train"]["adapters"]
    export = median(each["export"] for each in train["export_s"])
    return f"{result['train']['speed']:.2f}, {train['held_over_planned']:.2f}, {export:.2f} s"


def _adapters_held(result: Any) -> str:
    train = result["train"]["adapters"]
    return f"{train['tokens_per_s']:,} tokens/s, {train['gpu_used_gib']:.1f} GiB"


def _iteration_rows(row: Callable[..., Row]) -> Iterator[Row]:
    start = "python -m benchmarks.gpu.end_to_end"
    keep = "placement.offload_engines=false placement.offload_trainer=false"
    long = "trainer.max_pack_tokens=16640 engines.sglang.mem_fraction_static=0.5"
    four = f"{start} --shape 4b --lengths 2048 --samples 256 --gpus 4 --iterations 7 --save-every 3"
    four += " --overrides placement.task_runner=ray trainer.max_pack_tokens=4352"
    two = f"{start} --shape 1.7b --lengths 2048 --samples 256 --gpus 2 --overrides placement.task_runner=ray"
    cases = [
        ("2048", "0.6B, 128 × 2,048", f"{start} --lengths 2048"),
        ("512", "0.6B, 128 × 512", f"{start} --lengths 512 --iterations 6"),
        (
            "512, both keep their memory",
            "0.6B, 128 × 512 (both keep their memory),",
            f"{start} --lengths 512 --iterations 6 --overrides {keep}",
        ),
        (
            "8192",
            "0.6B, 64 × 8,192",
            f"{start} --lengths 8192 --samples 64 --iterations 2 --overrides {long}",
        ),
        ("1.7b 2048", "1.7B, 128 × 2,048", f"{start} --shape 1.7b --lengths 2048"),
        ("4b 2048", "4B, 64 × 2,048", f"{start} --shape 4b --lengths 2048 --samples 64"),
        ("1.7b 2048, two GPUs", "1.7B on two GPUs, work in shards, 256 × 2,048", two),
        ("4b 2048, four GPUs", "4B on four GPUs, work in shards, 256 × 2,048", four),
    ]
    for key, shown, command in cases:
        target = "orchestration < 2 %, gap < 0.02" if "2,048" in shown else "gap < 0.02"

        def split(result: Any, key: str = key) -> str | None:
            return _split(result, key)

        yield row("end_to_end", f"iteration, {shown} tokens", target, command, split)
    what = "its checkpoints of 4B, 56 GB, written while the run goes on"
    yield row("end_to_end", what, "wait ≤ 2 s, ≥ 0.8 of dd", four, _checkpoints_of_a_run)


def _checkpoint(result: Any) -> str:
    first, later = result["rounds"][0], result["rounds"][-1]
    waits = f"the trainer waits {later['stall_s']:.2f} s, at the first {first['stall_s']:.1f} s"
    return f"{waits}; {later['mib_s']:,.0f} MiB/s, {result['share_of_dd']:.2f} of dd's"


def _checkpoints_of_a_run(result: Any) -> str | None:
    if not (case := result.get("4b 2048, four GPUs")):
        return None
    waits = " and ".join(
        f"{one['checkpoint_s']:.2f}" for one in case["iterations"] if one["checkpoint_s"] > 1
    )
    rate = case["checkpoints"][-1]["mib_s"]
    return f"the run waits {waits} s; {rate:,.0f} MiB/s, {case['share_of_dd']:.2f} of dd's"


def _sync(result: Any, shape: str) -> str | None:
    if shape not in result:
        return None
    return f"{result[shape]['median_s']['sync']:.3f} s ({result[shape]['bytes'] / 1e9:.1f} GB)"


def _rollout(result: Any) -> str:
    ratios, tokens = result["ratios"], mean(result["ours_tokens_s"])
    return f"{result['ratio_median']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {tokens:,.0f} tokens/s"


def _long_rollout(result: Any) -> str | None:
    if "2,048 tokens" not in result:
        return None
    ratios, tokens = result["2,048 tokens"]["ratios"], mean(result["2,048 tokens"]["ours_tokens_s"])
    return f"{min(ratios):.2f} to {max(ratios):.2f}; {tokens:,.0f} tokens/s"


def _step(result: Any, shape: str, length: int) -> str | None:
    sides = {
        result["side"]: result
        for result in result["results"]
        if (result["shape"], result["length"]) == (shape, length)
    }
    if "millrace" not in sides:
        return None
    ours = sides["millrace"]
    shown = f"{ours['tokens_per_second']:,.0f} tokens/s, MFU {ours['mfu']:.1%}"
    if "huggingface" in sides:
        shown += f", {sides['huggingface']['seconds'] / ours['seconds']:.2f} times Hugging Face's speed"
    return shown


def _split(result: Any, key: str) -> str | None:
    case = result.get(key)
    if not case or "share" not in case:
        return None
    shares = ", ".join(f"{part} {case['share'][f'{part}_s']:.1%}" for part in PARTS)
    seconds, gap = case["mean"]["iteration_s"], case["mean"]["logprob_gap_mean"]
    return f"{seconds:.1f} s: {shares}; GPU busy {case['gpu_busy']:.0%}; log-prob gap {gap:.4f}"


def _held_out(curve: list[float | None]) -> str:
    points = [(index, value) for index, value in enumerate(curve, 1) if value is not None]
    return ", ".join(f"{value:.2f} at {index}" for index, value in points)


def _three_curves(result: Any) -> str:
    ends = [list(curve["held_out"].values()) for curve in result["curves"].values()]
    return ", ".join(f"{points[0]:.2f} to {points[-1]:.2f}" for points in ends)


def _gap(result: Any) -> str:
    gaps = result["curve"]["log_prob_gap"]
    return f"{mean(gaps):.4f}, {max(gaps):.4f}"


def _tests(result: Any) -> str:
    if "result" in result:
        return str(result["result"]).split(" (")[0]
    alone = sum(test["passed"] for name, test in result["results"].items() if not name.endswith(" again"))
    several = sum(run["passed"] for run in result["several GPUs"]["runs"].values())
    return f"{alone} passed on one GPU, {several} on several"
