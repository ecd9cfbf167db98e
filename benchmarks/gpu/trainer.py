"""The Megatron trainer's step on one GPU beside Hugging Face with torch's fused AdamW: tokens/s, MFU and a profile.

    python -m benchmarks.gpu.trainer [--shape 0.6b] [--lengths 2048 8192 16384 0] [--tokens 16384] [--steps 6]
                                     [--sides millrace fsdp huggingface] [--recompute none] [--profile 2048] [--out FILE]
    python -m benchmarks.gpu.trainer --shape 30b-a3b-4
    python -m benchmarks.gpu.trainer --shape 30b-a3b-4 --ep 2 [--offload 1]
    python -m benchmarks.gpu.trainer --shape 1.7b --offload 0,0.5,1

Both make the same GRPO step (clipped ratio, gradient clipping at 1, AdamW) on the same random tokens with random bf16
weights of the named Qwen3 shape. millrace: TrainerRank.train as a run calls it, batch file and metrics included, fp32 main
weights, gradients and moments. fsdp: the same of FsdpRank. Hugging Face: sdpa attention on [samples, length], no padding, no checkpointing, logits of
the response tokens at once, everything in bf16, AdamW's moments too: less work than ours, and the fastest way it has.
MFU counts 6 operations a weight and token (output layer: response tokens only) and causal attention, over 989 TFLOP/s.
Each figure is the median of the steps after two that warm up, the device's queue emptied before each reading of the clock.

A mixture of experts is measured at 2,048 tokens, without Hugging Face: with grouped products, then with its experts one after the
other. Both steps, the layers alone and parts of a layer are in the table, as are each layer's most rows of an expert over the mean.

With --ep it measures expert parallel ranks, a GPU each, of as many tokens each as above; also with --offload, a fraction then.
Otherwise with --offload it measures nothing else: the step at each fraction of trainer.optimizer.offload, of one pack of 16,384 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

PEAK = 989e12
PROMPT = 64
WARM_UP = 2


def make_model(name: str, folder: Path) -> Any:
    """A Hugging Face model on the GPU with random weights, also saved to the folder."""
    from benchmarks.gpu.shapes import random_model

    model = random_model(name)
    model.save_pretrained(folder)
    return model.train()


def lengths_of(tokens: int, length: int) -> list[int]:
    """Lengths of a step's samples; 0: as responses fall out, from 256 to 8192 tokens."""
    if length:
        return [length] * (tokens // length)
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < tokens - 512:
        lengths.append(min(round(2 ** draw.uniform(8, 13)), tokens - sum(lengths)))
    return lengths


def make_rows(step: int, lengths: list[int]) -> list[dict[str, Any]]:
    """Samples of one step in the schema of a batch."""
    from benchmarks.batch_rows import batch_row
    from benchmarks.gpu.shapes import VOCAB

    draw = random.Random(step)
    rows = []
    for i, length in enumerate(lengths):
        tokens = draw.choices(range(VOCAB), k=length)
        rows.append(batch_row(step, i, tokens, length - PROMPT, draw.uniform(-1, 1), -11.9))
    return rows


def operations(hf: Any, lengths: list[int]) -> float:
    """Floating point operations that a step needs."""
    head = 6 * hf.vocab_size * hf.hidden_size * sum(length - PROMPT for length in lengths)
    return layers_operations(hf, lengths) + float(head)


def layers_operations(hf: Any, lengths: list[int]) -> float:
    """The same of the layers alone, of whose experts those count that a token takes."""
    heads = hf.num_attention_heads * hf.head_dim
    ffn, router = hf.intermediate_size, 0
    if is_mixture(hf):
        ffn, router = hf.num_experts_per_tok * hf.moe_intermediate_size, hf.num_experts
    layer = hf.hidden_size * (2 * heads + 2 * hf.num_key_value_heads * hf.head_dim + 3 * ffn + router)
    body = 6 * hf.num_hidden_layers * layer * sum(lengths)
    attention = 6 * hf.num_hidden_layers * heads * sum(length**2 for length in lengths)
    return float(body + attention)


def is_mixture(hf: Any) -> bool:
    """Whether the model is a mixture of experts."""
    return getattr(hf, "num_experts", 0) > 0


def rank_config(
    model: Path,
    tokens: int,
    recompute: str,
    optimizer: dict[str, Any],
    *,
    saves: bool = False,
    **trainer: Any,
) -> dict[str, Any]:
    """The configuration of ranks. optimizer, trainer: fields of trainer.optimizer and of trainer."""
    from millrace.core.config import RunConfig

    config = RunConfig.model_validate(
        {
            "run": {"name": "benchmark", "iterations": 1000},
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"sources": [{"path": "none"}]},
            "trainer": {
                "device": "cuda",
                "max_pack_tokens": tokens,
                "recompute": recompute,
                "optimizer": {"lr": 1e-5, **optimizer},
                **trainer,
            },
            "algorithm": {"aggregation": "token_mean"},
            "checkpoint": {"background": saves},
        }
    )
    return config.model_dump(mode="json")


class Millrace:
    """The trainer, one rank on NCCL; a step reads its batch from a file, as in a run."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        tokens: int,
        recompute: str,
        *,
        saves: bool = False,
        kind: str = "megatron",
        **optimizer: Any,
    ) -> None:
        """saves: whether checkpoints will be written in the background, for which the rank takes memory at its start.

        optimizer: fields of trainer.optimizer.
        """
        from millrace.connectors.trainers.chosen import KINDS as TRAINERS

        self.scratch, self.version = scratch, 0
        config = rank_config(model, tokens, recompute, optimizer, saves=saves, kind=kind)
        self.rank = TRAINERS[kind](config, 0, 1)
        self.rank.setup(self.rank.address())

    def prepare(self, rows: list[dict[str, Any]]) -> str:
        """Write a step's batch; returns its path."""
        from benchmarks.batch_rows import write_batch

        return write_batch(self.scratch / rows[0]["sample_id"], rows)

    def step(self, prepared: str) -> dict[str, Any]:
        """Train on it; loss, gradient norm and the seconds of each phase."""
        from millrace.core.contracts.task_records import StepRequest

        self.version += 1
        metrics = self.rank.train(StepRequest(self.version, prepared))
        return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "phases": metrics["seconds"]}

    def close(self) -> None:
        """End the rank."""
        self.rank.shutdown()


class HuggingFace:
    """A Hugging Face model and torch's fused AdamW."""

    def __init__(self, model: Any) -> None:
        import torch

        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

    def prepare(self, rows: list[dict[str, Any]]) -> tuple[Any, Any]:
        """A step's tokens and advantages on the GPU."""
        import torch

        tokens = torch.tensor([row["tokens"] for row in rows], device="cuda")
        return tokens, torch.tensor([row["advantage"] for row in rows], device="cuda")

    def step(self, prepared: tuple[Any, Any]) -> dict[str, Any]:
        """Train on them; loss and gradient norm."""
        import torch
        from torch.nn import functional as F

        tokens, advantages = prepared
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]
        logits = self.model.lm_head(hidden)
        targets = tokens[:, PROMPT:]
        logprobs = -F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        del logits
        gain = advantages.repeat_interleave(targets.shape[1])
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    def close(self) -> None:
        """Nothing but memory to free."""


def timed(side: Any, number: int, lengths: list[int]) -> dict[str, Any]:
    """One step, with its seconds."""
    import torch

    prepared = side.prepare(make_rows(number, lengths))
    torch.cuda.synchronize()
    started = time.perf_counter()
    metrics = side.step(prepared)
    torch.cuda.synchronize()
    return {**metrics, "seconds": time.perf_counter() - started}


def measure(
    side: Any, name: str, hf: Any, first: int, steps: int, tokens: int, length: int
) -> dict[str, Any]:
    """Median of the steps at one length."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    lengths = lengths_of(tokens, length)
    made = [timed(side, first + i, lengths) for i in range(steps + WARM_UP)]
    seconds = statistics.median(step["seconds"] for step in made[WARM_UP:])
    figures = {
        "side": name,
        "length": length,
        "samples": len(lengths),
        "seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds,
        "mfu": operations(hf, lengths) / seconds / PEAK,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "all_seconds": [step["seconds"] for step in made],
        "loss": [step["loss"] for step in made],
        "grad_norm": [step["grad_norm"] for step in made],
    }
    if "phases" in made[0]:
        phases = [step["phases"] for step in made[WARM_UP:]]
        figures["phases"] = {p: statistics.median(each[p] for each in phases) for p in phases[0]}
    print(
        f"{name:<12} {length or 'mixed':>6} x {len(lengths):<3} {seconds * 1e3:8.1f} ms {figures['tokens_per_second'] / 1e3:7.1f}k tok/s "
        f"MFU {figures['mfu']:.1%}  peak {figures['peak_gib']:.1f} GiB  {figures.get('phases', '')}",
        flush=True,
    )
    return figures


def options_of_call() -> argparse.Namespace:
    """The command line's options; what is measured by default depends on the shape."""
    from benchmarks.gpu.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b", help="shape of the model")
    parser.add_argument("--lengths", type=int, nargs="+", help="0: mixed; 2048 8192 16384 0 when not given")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a step, one pack")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--sides", nargs="+", help="millrace huggingface when not given")
    parser.add_argument("--profile", type=int, nargs="*", help="lengths to profile")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel ranks")
    parser.add_argument("--offload", help="fractions of trainer.optimizer.offload, such as 0,0.5,1")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    options.mixture = "experts" in SHAPES[options.shape]
    options.lengths = options.lengths or ([2048] if options.mixture else [2048, 8192, 16384, 0])
    options.sides = options.sides or (["millrace"] if options.mixture else ["millrace", "huggingface"])
    options.profile = options.profile or ([2048] if options.mixture else [])
    return options


def expert_parallel(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The step of expert parallel ranks, with a fraction of the optimizer on the host if asked for."""
    from benchmarks.batch_rows import write_batch
    from benchmarks.gpu.expert_parallel import Job, measured
    from benchmarks.gpu.shapes import model_config, model_folder

    model = model_folder(options.shape, scratch / options.shape)
    hf = model_config(options.shape)
    lengths = lengths_of(options.tokens, options.lengths[0])
    batches = [
        write_batch(scratch / f"step-{n}", make_rows(n, lengths * options.ep))
        for n in range(1, options.steps + 4)
    ]
    config = rank_config(
        model,
        options.tokens,
        options.recompute,
        {"offload": float(options.offload or 0)},
        world_size=options.ep,
        parallel={"expert": options.ep},
    )
    work = operations(hf, lengths), layers_operations(hf, lengths)
    return measured(Job(config, batches, lengths, work, PEAK))


def fractions(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """The step at each fraction of the optimizer on the host."""
    from benchmarks.batch_rows import write_batch
    from benchmarks.gpu.offload import compared

    make_model(options.shape, scratch / "model")
    _free()

    def side(fraction: float) -> Millrace:
        return Millrace(scratch / "model", scratch, options.tokens, options.recompute, offload=fraction)

    lengths = lengths_of(options.tokens, options.lengths[0])
    prepared = [
        write_batch(scratch / f"step-{n}", make_rows(n, lengths)) for n in range(1, options.steps + 1)
    ]
    return compared([float(each) for each in options.offload.split(",")], side, prepared)


def both_sides(options: argparse.Namespace, scratch: Path, report: dict[str, Any]) -> None:
    """The steps of each side, one after the other, added to the report, which is kept after each."""
    import torch

    from benchmarks.gpu.expert_parts import compared
    from benchmarks.gpu.kernel_profile import profile

    started = time.perf_counter()
    hf_model = make_model(options.shape, scratch / "model")
    hf = hf_model.config
    print(f"model made in {time.perf_counter() - started:.1f} s", flush=True)
    if "huggingface" not in options.sides:
        del hf_model
    # Hugging Face first: its model is on the GPU already
    for name in sorted(options.sides, key=lambda side: (side != "huggingface", side)):
        started = time.perf_counter()
        side: Any = (
            HuggingFace(hf_model)
            if name == "huggingface"
            else Millrace(
                scratch / "model",
                scratch,
                options.tokens,
                options.recompute,
                kind="fsdp" if name == "fsdp" else "megatron",
            )
        )
        print(f"{name} ready in {time.perf_counter() - started:.1f} s", flush=True)
        number = 1
        for length in options.lengths:
            if name == "huggingface" and not length:
                continue  # it has no packs
            try:
                report["results"].append(
                    measure(side, name, hf, number, options.steps, options.tokens, length)
                )
            except torch.cuda.OutOfMemoryError as error:
                print(name, length, "out of memory:", str(error)[:200], flush=True)
                report["results"].append({"side": name, "length": length, "error": "out of memory"})
                if name != "huggingface":
                    break
            number += options.steps + WARM_UP
            if length in options.profile:
                prepared = side.prepare(make_rows(number, lengths_of(options.tokens, length)))
                number += 1
                table = profile(lambda side=side, prepared=prepared: side.step(prepared))
                report["profiles"].append({"side": name, "length": length, **table})
            if options.mixture and name == "millrace":
                lengths = lengths_of(options.tokens, length)
                work = operations(hf, lengths), layers_operations(hf, lengths)

                def whole(number: int, side: Any = side, lengths: list[int] = lengths) -> float:
                    return float(timed(side, number, lengths)["seconds"])

                report["experts"] = compared(side.rank, whole, lengths, work, number, PEAK)
                number += 100
            _keep(report, options.out)
        side.close()
        if name == "huggingface":
            del hf_model
        del side
        _free()


def main() -> None:
    """Measure both sides and print a table; JSON where asked for."""
    from benchmarks.gpu.shapes import command_line

    options = options_of_call()

    import torch

    report: dict[str, Any] = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": options.shape,
        "recompute": options.recompute,
        "results": [],
        "profiles": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        if options.ep > 1:
            report |= expert_parallel(options, Path(scratch))
            _keep(report, options.out)
            return
        if options.offload:
            report["offload"] = fractions(options, Path(scratch))
        else:
            both_sides(options, Path(scratch), report)
    _keep(report, options.out)


def _free() -> None:
    """What Python no longer names gives its memory of the GPU back."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _keep(report: dict[str, Any], file: Path | None) -> None:
    if file:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
