"""Tokens a second of the embedded engine at 64 concurrent requests over HTTP, against one-by-one `generate`.

Both on the same tiny model, threads, prompts and number of tokens, in one run; JSON to stdout, a table to stderr.

    python -m benchmarks.embedded_engine [--threads 2] [--requests 64] [--prompt 32] [--tokens 128] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

TARGET = 5.0
TIMEOUT_S = 600


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side")
    parser.add_argument("--requests", type=int, default=64, help="requests, all at once for the engine")
    parser.add_argument("--alone", type=int, default=8, help="of them, how many are generated one by one")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each side, in turn")
    parser.add_argument("--hidden", type=int, default=96, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    report = measure(options)
    show(report)
    print(json.dumps(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    from millrace.connectors.huggingface.tiny import build_tiny_model

    torch.set_num_threads(args.threads)
    draw = random.Random(0)
    prompts = [[draw.randrange(6, 80) for _ in range(args.prompt)] for _ in range(args.requests)]
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(
            Path(folder) / "model",
            hidden_size=args.hidden,
            intermediate_size=2 * args.hidden,
            layers=args.layers,
        )
        port_file = Path(folder) / "port"
        engine = start_engine(model, port_file, args.threads)
        try:
            url = f"http://127.0.0.1:{wait_for(port_file, engine)}"
            generate = alone(model, args.tokens)
            asyncio.run(together(url, prompts, args.tokens))  # warm-up of both
            generate(prompts[:1])
            served, plain = [], []
            for _ in range(args.repeats):
                served.append(asyncio.run(together(url, prompts, args.tokens)))
                plain.append(generate(prompts[: args.alone]))
        finally:
            engine.kill()
            engine.wait()
    fast, slow = statistics.median(served), statistics.median(plain)
    return {
        "benchmark": "embedded_engine",
        "command": " ".join(["python -m benchmarks.embedded_engine", *sys.argv[1:]]),
        "torch": torch.__version__,
        **{name: value for name, value in vars(args).items() if name != "out"},
        "engine_tokens_per_second": served,
        "generate_tokens_per_second": plain,
        "ratio": fast / slow,
        "target": TARGET,
    }


def start_engine(model: Path, port_file: Path, threads: int) -> subprocess.Popen[bytes]:
    """The engine as a process of its own."""
    command = [
        sys.executable,
        "-m",
        "millrace.connectors.engines.embedded",
        "--model-path",
        str(model),
        "--port",
        "0",
    ]
    command += ["--port-file", str(port_file), "--threads", str(threads), "--max-running-requests", "64"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def wait_for(port_file: Path, engine: subprocess.Popen[bytes]) -> int:
    """The engine's port once it listens."""
    while not port_file.exists():
        if engine.poll() is not None:
            raise SystemExit("the engine did not start")
        time.sleep(0.05)
    return int(port_file.read_text())


async def together(url: str, prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second with all prompts sent at once."""
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def one(prompt: list[int]) -> int:
            params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            async with session.post(url + "/generate", json=body) as answer:
                answer.raise_for_status()
                return len((await answer.json())["output_ids"])

        async with session.post(url + "/flush_cache") as answer:
            answer.raise_for_status()
        started = time.perf_counter()
        counts = await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - started
    assert counts == [tokens] * len(prompts)
    return sum(counts) / seconds


def alone(folder: Path, tokens: int) -> Any:
    """A function from prompts to the tokens a second of transformers' `generate`, one after the other."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    do_sample=True,
                    top_k=0,
                    pad_token_id=0,
                )
            assert out.shape[1] == len(prompt) + tokens
        return len(prompts) * tokens / (time.perf_counter() - started)

    return run


def show(report: dict[str, Any]) -> None:
    """A table for people, and the command that made it."""
    table = Table(
        title=f"{report['requests']} requests of {report['prompt']} + {report['tokens']} tokens, {report['threads']} threads"
    )
    for name in ("", "tokens/s, median", "all"):
        table.add_column(name, justify="left" if not name else "right")
    for name, key in (("embedded engine, HTTP", "engine"), ("generate, one by one", "generate")):
        values = report[f"{key}_tokens_per_second"]
        table.add_row(name, f"{statistics.median(values):,.0f}", ", ".join(f"{v:,.0f}" for v in values))
    table.add_row("ratio", f"{report['ratio']:.1f}", f"target {report['target']:g}")
    console = Console(stderr=True)
    console.print(table)
    console.print(report["command"], highlight=False)


if __name__ == "__main__":
    main()
