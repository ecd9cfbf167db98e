"""A whole run of a small model of any family on a GPU, and what it must have left."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from millrace.connectors.engines.sglang import server_args
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.fixed_texts import Logprobs
from millrace.tasks.weight_check import LONGEST, TEXTS
from tests.support import gpu_families, gpu_workplace
from tests.support.flow_runs import Workplace, failures, output_of, trained
from tests.support.gpu_workplace import steps_of
from tests.support.tiny_models import know_kimi

SERVED = "SGLang serves it"
# what SGLang does with each family, or why a run of it needs another engine
ENGINES = {
    "llama": SERVED,
    "mistral": SERVED,
    "qwen2": SERVED,
    "qwen2_moe": SERVED,
    "qwen3": SERVED,
    "qwen3_moe": SERVED,
    "qwen3_next": SERVED,
    "qwen3_5_text": SERVED,
    "qwen3_5_moe_text": SERVED,
    "glm4": SERVED,
    "deepseek_v3": SERVED,
    "kimi_k2": SERVED,
    "glm4_moe_lite": SERVED,
    "gpt_oss": SERVED,
    "glm4_moe": SERVED,
}
# of a model that is served. SGLang's Triton kernels decode with a window one token shorter than they prefill with
SERVED_AS: dict[str, dict[str, Any]] = {"gpt_oss": {"sliding_window": 128}}
RUNS = [name for name, engine in ENGINES.items() if engine == SERVED]
ITERATIONS, PROMPTS, GROUP = 2, 16, 8
PATIENCE_S = 420
# nats a token on the fixed texts, of computations in bfloat16; weights of one kind that two iterations did not reach make 0.03 and more
PROMPT_GAP = 0.04
# what a run allows: a gap above PROMPT_GAP is compared with that of an engine that started from the export. Qwen3-Next has four
# layers here, and rounding turns choices of experts: tests/connectors/megatron/test_gpu_families.py measures it on a CPU
ALLOWED_GAP = 0.2
SAME_GAP = 0.1  # share of it by which the gaps of two engines with equal weights may differ: their batches are not the same
SGLANG = {
    **gpu_workplace.shapes.SGLANG,
    "cuda_graph_max_bs_decode": 16,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 32768,
}


def configuration(folder: Path, family: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """Two iterations of two steps on sums, with steps that move log-probabilities by far more than rounding."""
    own: dict[str, dict[str, Any]] = {
        "run": {"name": family.replace("_", "-"), "iterations": ITERATIONS},
        "rollout": {
            "prompts": PROMPTS,
            "samples_per_prompt": GROUP,
            "part_groups": 4,
            "max_concurrency": PROMPTS * GROUP,
            "sampling": {"max_new_tokens": 48},
        },
        "trainer": {"global_batch": PROMPTS * GROUP // 2, "optimizer": {"lr": 1e-3}},
        "engines": {"sglang": SGLANG},
        # buckets of which each model has several
        "sync": {"kind": "ipc", "max_prompt_gap": ALLOWED_GAP, "bucket_mib": 1},
        "checkpoint": {"every": 2, "export_last": True},
    }
    return gpu_workplace.shapes.laid_over(gpu_workplace.configuration(folder, **own), changes)


def furnish(folder: Path, family: str, **changes: dict[str, Any]) -> None:
    """Model, prompts and run.yaml."""
    gpu_families.save_model(folder / "model", family, **SERVED_AS.get(family, {}))
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(20) for b in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration(folder, family, **changes)))


def trained_by_a_run(place: Workplace, family: str, within: str = "", **changes: dict[str, Any]) -> Path:
    """The folder of a run that went to its end. within: a folder for it; an error has the end of the engine's log."""
    folder = place.folder / within / family
    furnish(folder, family, **changes)
    run = folder / "runs" / family.replace("_", "-")
    process = place.start("train", str(folder / "run.yaml"))
    out = output_of(process, PATIENCE_S)
    log = run / "logs" / "engine-0.log"
    told = "\n".join(log.read_text(errors="replace").splitlines()[-60:]) if log.exists() else "no log"
    assert process.returncode == 0, f"{out[-6000:]}\n--- {log}\n{told}"
    return run


@dataclass(frozen=True)
class Seen:
    """What a run recorded of its engine, by step and by sync."""

    step_gaps: list[float]  # nats a token, on samples
    step_limits: list[float]
    prompt_gaps: list[float]  # on fixed texts, after a sync
    checksums: list[str]  # hash of the engine's weights after a sync


def check(run: Path) -> Seen:
    """Assert what every whole run has left."""
    assert json.loads((run / "run.json").read_text())["completed"]
    assert not failures(run)
    pairs = trained(run)
    assert len(pairs) == len({sample for sample, _ in pairs}) == ITERATIONS * PROMPTS * GROUP
    compared = [step for step in steps_of(run) if "logprob_gap_limit" in step]
    syncs = [
        json.loads((run / "iterations" / f"{number:06d}" / "results" / "sync_weights.json").read_text())
        for number in range(ITERATIONS)
    ]
    records = [json.loads(record["result"]) for record in syncs]
    seen = Seen(
        [step["logprob_gap_mean"] for step in compared],
        [step["logprob_gap_limit"] for step in compared],
        [record["prompt_gap"] for record in records],
        [sum for record in records for sum in record["checksums"].values()],
    )
    print(run.name, seen)
    assert len(seen.step_gaps) >= ITERATIONS
    assert all(0 < gap < limit for gap, limit in zip(seen.step_gaps, seen.step_limits, strict=True))
    assert all(gap > 0 for gap in seen.prompt_gaps)
    assert len(set(seen.checksums)) == ITERATIONS  # each sync brought other weights
    return seen


def check_export(run: Path) -> Path:
    """Assert that Hugging Face's class loads the export, and that steps changed each of its matrices. Returns its folder."""
    from transformers import AutoModelForCausalLM

    export = run / "exports" / f"{ITERATIONS:06d}"
    know_kimi()
    AutoModelForCausalLM.from_pretrained(export)
    first, last = (gpu_families.stored(folder) for folder in (run.parents[1] / "model", export))
    assert {name: each.shape for name, each in first.items()} == {
        name: each.shape for name, each in last.items()
    }
    assert [name for name in first if first[name].ndim > 1 and torch.equal(first[name], last[name])] == []
    return export


def fixed_prompts(folder: Path) -> list[list[int]]:
    """Token ids of the texts that a sync is compared on."""
    from transformers import AutoTokenizer

    tokenizer = PromptTokenizer(AutoTokenizer.from_pretrained(folder))
    return [ids[:LONGEST] for ids in tokenizer.encode_prompts(list(TEXTS), chat=False)]


def trainer_logprobs(folder: Path, prompts: list[list[int]]) -> Logprobs:
    """Log-probabilities of prompts by a trainer that holds a folder's weights, as a run compares them."""
    from millrace.connectors.trainers.megatron.rank import TrainerRank

    rank = TrainerRank(gpu_families.settings(folder, "cuda" if torch.cuda.is_available() else "cpu"), 0, 1)
    rank.setup(rank.address())
    try:
        return rank_logprobs(rank, 0, prompts)
    finally:
        rank.shutdown()


def rank_logprobs(rank: Any, version: int, prompts: list[list[int]]) -> Logprobs:
    """The same of a rank that holds a version."""
    samples = [HeldOutSample(ids[: end + 1], [1]) for ids in prompts for end in range(1, len(ids))]
    losses = iter(rank.losses(version, samples))
    return [[-next(losses) for _ in ids[1:]] for ids in prompts]


def entry_classes() -> set[str]:
    """Names of the classes of models that the installed SGLang registers, read from its source."""
    names: set[str] = set()
    for folder in server_args._folders("sglang"):
        for path in (folder / "srt" / "models").glob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8-sig")).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                    names |= {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
    return names
