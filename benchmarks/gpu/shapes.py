"""Models of real sizes with random weights, prompts for them and configurations: what the GPU benchmarks run on.

    python -m benchmarks.gpu.shapes 0.6b FOLDER

Weights are bf16 normals, so that no checkpoint is needed; the tokenizer is one of a token a character. Every sample runs to
its full length, since the end token is one of 151,936. The normals' width falls with the root of the model's: logits then
spread alike at every shape, and bf16 computes their log-probabilities to about 0.01 (0.02 at every width: 0.02 at 1.7b).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"hidden": 1024, "ffn": 3072, "layers": 28, "heads": 16},
    "1.7b": {"hidden": 2048, "ffn": 6144, "layers": 28, "heads": 16},
    "4b": {"hidden": 2560, "ffn": 9728, "layers": 36, "heads": 32},
}
# layers of Qwen3-30B-A3B: the optimizer state of four fits one GPU, that of twelve two
A3B = {"hidden": 2048, "ffn": 6144, "heads": 32, "kv_heads": 4, "experts": 128, "expert_ffn": 768}
SHAPES |= {f"30b-a3b-{layers}": {**A3B, "layers": layers} for layers in (4, 12)}
# all of it, whose weights fit one GPU without an optimizer; and one to try a command on a CPU
SHAPES["30b-a3b"] = {**A3B, "layers": 48}
SHAPES["tiny-a3b"] = {
    "hidden": 64, "ffn": 128, "heads": 2, "kv_heads": 1, "experts": 16, "expert_ffn": 32, "layers": 2,
}  # fmt: skip
VOCAB = 151936
SGLANG = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
}


def main() -> None:
    """Write one model folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_model(options.shape, options.folder)


def model_folder(shape: str, folder: Path) -> Path:
    """The folder of a shape's model, written by a process of its own unless it is there: no GPU memory is left held."""
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "benchmarks.gpu.shapes", shape, str(folder)]
        subprocess.run(command, check=True)
    return folder


def write_model(shape: str, folder: Path) -> None:
    """Config, random weights and tokenizer."""
    from millrace.connectors.huggingface.tiny import build_tokenizer

    partial = folder.with_name(f"{folder.name}.partial")
    random_model(shape, pad_token_id=0, eos_token_id=1, bos_token_id=None).save_pretrained(partial)
    build_tokenizer().save_pretrained(partial)
    partial.rename(folder)


def random_model(shape: str, **special: Any) -> Any:
    """A Hugging Face model of a shape with random weights, on the GPU where there is one; `special`: its config's tokens."""
    import torch
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

    config = model_config(shape, **special)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = (Qwen3MoeForCausalLM if SHAPES[shape].get("experts") else Qwen3ForCausalLM)(config)
    torch.set_default_dtype(torch.float32)
    return model


def model_config(shape: str, **special: Any) -> Any:
    """The Hugging Face configuration of a shape; `special`: its tokens."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    sizes = SHAPES[shape]
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["ffn"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes.get("kv_heads", 8),
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "initializer_range": 0.02 * (1024 / sizes["hidden"]) ** 0.5,
        "dtype": "bfloat16",
        "attn_implementation": "sdpa",
        **special,
    }
    if not sizes.get("experts"):
        return Qwen3Config(**values)
    mixture = {
        "num_experts": sizes["experts"],
        "num_experts_per_tok": 8,
        "moe_intermediate_size": sizes["expert_ffn"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }
    return Qwen3MoeConfig(**{**values, **mixture})


def weight_bytes(folder: Path) -> int:
    """Bytes of a model's weights, as they go to the engines."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def configuration(model: Path, folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """A colocated GRPO run on one GPU with SGLang; `changes` by section. Prompts are written beside it."""
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(32) for b in range(32)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "bench", "iterations": 1},
        "data": {"max_prompt_tokens": 64, "sources": [{"name": "sums", "path": str(prompts)}]},
        "rollout": {"prompts": 32, "samples_per_prompt": 8, "max_concurrency": 256},
        "reward": {"function": "benchmarks.gpu.shapes:coin"},
        "checkpoint": {"every": 10_000, "export_last": False},
    }
    return laid_over(laid_over(colocated(model, folder), settings), changes)


def colocated(model: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """What every GRPO run on one GPU with SGLang has in common."""
    return {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "storage": {"root": str(folder / "runs")},
        "algorithm": {"preset": "grpo"},
        "trainer": {
            "device": "cuda",
            "deterministic": False,
            "max_pack_tokens": 16384,
            "optimizer": {"lr": 1e-6},
        },
        "engines": {"kind": "sglang", "sglang": {**SGLANG, "mem_fraction_static": 0.3}},
        "placement": {"colocate": True},
    }


def laid_over(
    values: dict[str, dict[str, Any]], changes: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The values with the changed fields of each section in place of theirs; a section of another `kind` is replaced."""
    changed = {
        section: {**_kept(values.get(section, {}), fields), **fields} for section, fields in changes.items()
    }
    return {**values, **changed}


def _kept(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return values if changes.get("kind", values.get("kind")) == values.get("kind") else {}


def coin(sample: Any, **_: Any) -> float:
    """A reward that varies within a group and says nothing."""
    return float(zlib.crc32(sample.response.encode()) % 2)


def command_line() -> str:
    """The command that runs, as one types it: `python -m benchmarks.gpu.sync --shapes 0.6b`."""
    spec = sys.modules["__main__"].__spec__
    return " ".join(["python -m", spec.name if spec else "?", *sys.argv[1:]])


def device_name() -> str:
    """The first GPU, its memory and the driver."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def versions() -> dict[str, str]:
    """What decides the figures."""
    from importlib import metadata

    import torch

    installed = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("megatron-core", "ray", "prefect", "transformers"):
        with contextlib.suppress(
            metadata.PackageNotFoundError
        ):  # the trainer's benchmarks need neither Ray nor Prefect
            installed[name] = metadata.version(name)
    site = os.environ.get("MILLRACE_SGLANG_PYTHONPATH")
    paths = [site] if site else sys.path
    installed["sglang"] = next(
        (d.version for d in metadata.distributions(name="sglang", path=paths)), "unknown"
    )
    return installed


if __name__ == "__main__":
    main()
