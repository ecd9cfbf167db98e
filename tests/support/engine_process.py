"""Starting the embedded engine as a process, and a plain Hugging Face forward to compare with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from millrace.connectors.huggingface.tiny import build_tiny_model

START_TIMEOUT_S = 120
# of log-probabilities to the fp32 reference
CLOSE = float(os.environ.get("MILLRACE_ENGINE_TOLERANCE", "1e-4"))
EXACT = CLOSE < 1e-3  # an engine in bf16 need not repeat its own tokens in another batch


def peaked_model(folder: Path, seed: int, **shape: Any) -> Path:
    """A random tiny Qwen3 whose matrices are scaled up: its distributions are far from uniform and use the context."""
    made = build_tiny_model(folder, seed=seed, tie_word_embeddings=False, **shape)
    path = made / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        tensors[name] = tensor * (12 if name == "lm_head.weight" else 4 if tensor.ndim > 1 else 1)
        if tensor.ndim == 1:  # norms start at 1, which would hide a mix-up
            generator = torch.Generator().manual_seed(len(name) + seed)
            tensors[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})
    return made


@contextlib.contextmanager
def embedded_engine(
    model: Path, *arguments: str, log: Path, key: str | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The engine's URL and process, for as long as the block runs; it asks for a key if one is given."""
    port_file = log.with_suffix(".port")
    command = [
        sys.executable,
        "-m",
        "millrace.connectors.engines.embedded",
        "--model-path",
        str(model),
        "--port",
        "0",
    ]
    command += ["--port-file", str(port_file), "--threads", "1", *arguments]
    secret = {"MILLRACE_ENGINE_KEY": key} if key else {}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **secret},
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}", process
    finally:
        process.kill()
        process.wait()


@lru_cache(maxsize=4)
def _reference(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(folder: Path | str, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Logits [len(output), V] that predict each output token, by a plain forward pass."""
    tokens = torch.tensor([[*prompt, *output]])
    logits: torch.Tensor = _reference(str(folder))(tokens).logits[0]
    return logits[len(prompt) - 1 : -1].float()


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    """Log-probabilities of an answer's tokens."""
    return [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]


def reference_logprobs(
    folder: Path | str, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """log_softmax(logits / temperature) at each output token; temperature 0 counts as 1."""
    scaled = reference_logits(folder, prompt, output) / (temperature or 1.0)
    picked = scaled.log_softmax(-1).gather(1, torch.tensor(list(output))[:, None])[:, 0]
    found: list[float] = picked.tolist()
    return found
