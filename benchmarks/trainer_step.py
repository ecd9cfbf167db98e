"""The Megatron trainer's step beside the plainest one: Hugging Face model, padded batch, torch AdamW; on CPU.

    python -m benchmarks.trainer_step [--threads 2] [--steps 15] [--only quickstart] [--out FILE]

Both make the same step (clipped policy loss, gradient clipping at 1, AdamW in fp32) on the same tokens with the same
threads, in processes of their own that take turns, so that noise of the host meets both. The plain step computes
logits of response tokens only, which favours it. Reported: the median seconds of a whole step, after two that warm up.
The loss and the gradient norm of every step are compared: equal work, or the figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from millrace.core.contracts.task_records import StepRequest

LR, CLIP, BETAS = 1e-4, 1.0, (0.9, 0.98)
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    samples: int
    prompt: tuple[int, int]  # shortest and longest, tokens
    response: tuple[int, int]
    model: tuple[tuple[str, int], ...] = ()


CASES = {
    "quickstart": Case(512, (5, 8), (2, 8)),
    "larger": Case(
        64,
        (48, 64),
        (128, 192),
        (
            ("hidden_size", 256),
            ("intermediate_size", 768),
            ("layers", 4),
            ("heads", 8),
            ("kv_heads", 4),
            ("vocab_size", 1024),
        ),
    ),
}


def make_rows(case: Case, step: int, vocab: int) -> list[dict[str, Any]]:
    """Samples of one step in the schema of a batch."""
    from benchmarks.batch_rows import batch_row

    draw = random.Random(step)
    rows = []
    for i in range(case.samples):
        prompt, response = draw.randint(*case.prompt), draw.randint(*case.response)
        tokens = [draw.randrange(6, vocab) for _ in range(prompt + response)]
        rows.append(batch_row(step, i, tokens, response, draw.uniform(-1, 1), -4.5))
    return rows


class Megatron:
    """The trainer, one rank; a step reads its batch from a file, as in a run."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        from millrace.connectors.trainers.megatron.rank import TrainerRank
        from millrace.core.config import RunConfig

        self.folder = folder
        config = RunConfig.model_validate(
            {
                "run": {"name": "benchmark", "iterations": 1000},
                "model": {"path": str(model)},
                "data": {"sources": [{"path": "none"}]},
                "trainer": {
                    "threads": threads,
                    "device": "cpu",
                    "max_pack_tokens": 16384,
                    "optimizer": {"lr": LR, "clip_grad": CLIP, "betas": BETAS},
                },
                "algorithm": {"aggregation": "token_mean"},
            }
        )
        self.rank = TrainerRank(config.model_dump(mode="json"), 0, 1)
        self.rank.setup(self.rank.address())

    def step(self, number: int) -> dict[str, Any]:
        """Train on the batch of a step; its seconds, loss and gradient norm."""
        request = StepRequest(number, str(self.folder / str(number) / "batch.parquet"))
        started = time.perf_counter()
        metrics = self.rank.train(request)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "phases": metrics["seconds"]} | {
            n: metrics[n] for n in ("loss", "grad_norm")
        }


class Plain:
    """A Hugging Face model and torch's AdamW on a padded batch."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.folder = folder
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=1e-8, weight_decay=0.0, fused=True
        )

    def step(self, number: int) -> dict[str, Any]:
        """Train on the batch of a step; its seconds, loss and gradient norm."""
        import torch

        rows = json.loads((self.folder / str(number) / "rows.json").read_text())
        started = time.perf_counter()
        lengths = torch.tensor([len(row["tokens"]) for row in rows])
        responses = torch.tensor([row["response_length"] for row in rows])
        width = int(lengths.max())
        tokens = torch.tensor([row["tokens"] + [0] * (width - len(row["tokens"])) for row in rows])
        places = torch.arange(width)[None]
        ends = lengths[:, None] - 1
        # positions whose next token is trained on
        before = (places >= ends - responses[:, None]) & (places < ends)
        hidden = self.model.model(
            input_ids=tokens, attention_mask=places < lengths[:, None]
        ).last_hidden_state
        logits = self.model.lm_head(hidden[before])
        chosen = tokens.roll(-1, 1)[before]
        logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        advantages = torch.tensor([row["advantage"] for row in rows]).repeat_interleave(responses)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        metrics = {"loss": loss.item(), "grad_norm": norm.item()}
        return {"seconds": time.perf_counter() - started, **metrics}


def _serve(pipe: Any, kind: str, folder: Path, model: Path, threads: int) -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    side = {"megatron": Megatron, "plain": Plain}[kind](folder, model, threads)
    pipe.send(None)
    while (number := pipe.recv()) is not None:
        pipe.send(side.step(number))


def measure(name: str, case: Case, threads: int, steps: int) -> dict[str, Any]:
    """Median seconds of both sides, and their ratio. Asserts that they did the same."""
    from benchmarks.batch_rows import write_batch
    from millrace.connectors.huggingface.tiny import build_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape = dict(case.model)
        model = build_tiny_model(folder / "model", **shape)
        for number in range(1, steps + WARM_UP + 1):
            rows = make_rows(case, number, shape.get("vocab_size", 96))
            write_batch(folder / str(number), rows)
            (folder / str(number) / "rows.json").write_text(json.dumps(rows))
        spawn = get_context("spawn")
        pipes = {}
        for kind in ("megatron", "plain"):
            pipes[kind], there = spawn.Pipe()
            spawn.Process(target=_serve, args=(there, kind, folder, model, threads), daemon=True).start()
        for pipe in pipes.values():
            pipe.recv()
        answers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in pipes}
        for number in range(1, steps + WARM_UP + 1):
            for kind, pipe in pipes.items():
                pipe.send(number)
                answers[kind].append(pipe.recv())
        for pipe in pipes.values():
            pipe.send(None)
    for ours, plain in zip(*answers.values(), strict=True):
        for figure in ("loss", "grad_norm"):
            assert abs(ours[figure] - plain[figure]) <= 1e-3 * abs(plain[figure]) + 1e-5, (
                figure,
                ours,
                plain,
            )
    seconds = {
        kind: statistics.median(s["seconds"] for s in made[WARM_UP:]) for kind, made in answers.items()
    }
    phases = [s["phases"] for s in answers["megatron"][WARM_UP:]]
    return {
        "case": name,
        **asdict(case),
        "threads": threads,
        "steps": steps,
        "megatron_s": seconds["megatron"],
        "plain_s": seconds["plain"],
        "ratio": seconds["megatron"] / seconds["plain"],
        "megatron_phases_s": {p: statistics.median(made[p] for made in phases) for p in phases[0]},
    }


def main() -> None:
    """Measure the cases and print a table; JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    results = []
    print(f"{'case':<12}{'megatron':>12}{'plain':>12}{'ratio':>8}   phases of the trainer (ms)")
    for name, case in CASES.items():
        if options.only in (None, name):
            one = measure(name, case, options.threads, options.steps)
            results.append(one)
            phases = "  ".join(f"{p} {s * 1e3:.1f}" for p, s in one["megatron_phases_s"].items())
            times = f"{one['megatron_s'] * 1e3:>9.1f} ms{one['plain_s'] * 1e3:>9.1f} ms"
            print(f"{name:<12}{times}{one['ratio']:>8.2f}   {phases}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
