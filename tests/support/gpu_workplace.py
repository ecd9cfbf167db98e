"""A workplace of the command line on a GPU host: a model of 200 million random weights and a colocated run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.gpu import shapes
from millrace.connectors.huggingface.tiny import build_tiny_model

SERVER = "sglang.launch_server"
PROMPTS, GROUP, LONGEST = 32, 8, 512
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "layers": 16,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
}
SGLANG = {**shapes.SGLANG, "cuda_graph_max_bs_decode": 64, "mem_fraction_static": 0.3}


def configuration(folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """Iterations of some seconds, whose samples end at very different lengths; `changes` by section."""
    own: dict[str, dict[str, Any]] = {
        "run": {"name": "a", "iterations": 4},
        "data": {"max_prompt_tokens": 32, "sources": [{"name": "sums", "path": str(folder / "train.jsonl")}]},
        "rollout": {
            "prompts": PROMPTS,
            "samples_per_prompt": GROUP,
            "part_groups": 4,
            "max_concurrency": PROMPTS * GROUP,
            "sampling": {"max_new_tokens": LONGEST, "stop_token_ids": list(range(100, 112))},
        },
        "reward": {"function": "millrace.core.rewards.text:contains", "workers": 2},
        "trainer": {"optimizer": {"lr": 1e-5}},
        "engines": {"sglang": SGLANG},
        "sync": {"kind": "ipc", "max_prompt_gap": 0.02},
        "checkpoint": {"every": 2, "export_last": False},
    }
    return shapes.laid_over(shapes.laid_over(shapes.colocated(folder / "model", folder), own), changes)


def furnish(folder: Path, *, shape: Mapping[str, Any] = MODEL, **changes: dict[str, Any]) -> None:
    """Model, prompts and run.yaml."""
    if not (folder / "model").exists():
        build_tiny_model(folder / "model", **shape)
        rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(20) for b in range(20)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration(folder, **changes)))


def server_of(model: Path) -> psutil.Process | None:
    """The SGLang server that serves a model folder: the process that was started, not its workers."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if SERVER in line and str(model) in line:
            parent = process.parent()
            if parent is None or SERVER not in parent.cmdline():
                return process
    return None


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Every step of a run, in order."""
    files = sorted((run / "iterations").glob("*/step.json"))
    return [step for file in files for step in json.loads(file.read_text())["steps"]]
