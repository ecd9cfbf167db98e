"""A small model of each family for a GPU, in sizes that kernels and SGLang take, and plain models to compare with.

Weights are in bfloat16, of a width at which distributions are far from uniform and a mix-up shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.plain_rl import adamw, clipped_step, grpo_loss, response_logprobs
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.trainers.packing import make_packs
from millrace.core.contracts.task_records import StepRequest
from millrace.core.families.decoder import EXPERT_COUNTS
from tests.support import trainer_ranks
from tests.support.plain_lora import add_pairs
from tests.support.tiny_models import know_kimi, save_tiny_model

Rows = list[dict[str, Any]]

VOCABULARY = 128
EXACT = 2e-4  # nats, of two computations in float32
GRADIENTS = 0.05  # of a tensor's gradient, by its norm; 0.03 in bfloat16, and more of deep models
ROUNDED = 1.5  # times what the plain model's gradients differ in bfloat16
NORMS = 0.03  # of a gradient's norm
LONGEST = 80  # tokens of an answer: several windows, and past the context before YaRN
ROUTER_BIAS = "e_score_correction_bias"  # float32 in every checkpoint

SIZES: dict[str, Any] = {
    "hidden_size": 384,  # no multiple of 256, for which SGLang would compile a kernel of its own
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
# three or more experts a token: only then does the order of their sum change it
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
SIGMOID = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
# widths of heads and of the latent are published ones, for which SGLang has kernels; SGLang's epsilon of latents' norms is rms_norm_eps
LATENT = {
    **SIGMOID,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
# heads are of published widths, for which SGLang has kernels
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    # SGLang takes a head's width to be hidden_size over the heads, whatever head_dim says
    "qwen2_moe": {**EXPERTS, "num_attention_heads": 6, "shared_expert_intermediate_size": 256},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 128},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 128},
    "glm4": {},
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 16,
        "rope_parameters": {**YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "kimi_k2": {**LATENT, "n_routed_experts": 12, "v_head_dim": 128},  # no power of two, as its 384
    "glm4_moe_lite": {
        **LATENT,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
    "gpt_oss": {
        "intermediate_size": 384,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 8,
        "swiglu_limit": 7.0,  # transformers before 5.19 takes no other
        "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
    },
    "glm4_moe": SIGMOID,
}
# keys of published checkpoints that SGLang reads and transformers does not write
DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
WRITTEN: dict[str, dict[str, Any]] = {
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK,
    "glm4_moe_lite": {"topk_method": "noaux_tc", "first_k_dense_replace": 1},
    **{name: {"full_attention_interval": 2} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}


def smooth(family: str) -> dict[str, Any]:
    """Changes with which rounding turns no choice: a token uses all experts."""
    own = OWN[family]
    changes: dict[str, Any] = {}
    for experts in (own[key] for key in EXPERT_COUNTS if key in own):
        changes["num_experts_per_tok"] = experts
    if "n_routed_experts" in own:
        changes |= {"n_group": 1, "topk_group": 1}
    return changes


def save_model(folder: Path, family: str, **changes: Any) -> Path:
    """Write a family's model with a tokenizer of a token a character; `changes` are laid over its configuration."""
    save_tiny_model(folder, family, VOCABULARY, **{**SIZES, **OWN[family], **changes})
    tensors = load_file(folder / "model.safetensors")
    narrow = {
        name: tensor if name.endswith(ROUTER_BIAS) else tensor.bfloat16() for name, tensor in tensors.items()
    }
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "dtype": "bfloat16", **WRITTEN.get(family, {})}
    path.write_text(json.dumps(config))
    build_tokenizer().save_pretrained(folder)
    return folder


class PlainModel:
    """Hugging Face's class, one sequence at a time, with torch's AdamW."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: str, lr: float = 1e-3, adapters: Path | None = None
    ) -> None:
        """adapters: a folder of pairs that are trained instead of the weights."""
        import transformers

        know_kimi()
        self.device = device
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        if adapters is not None:
            for pair in add_pairs(self.model, adapters).values():
                pair.to(dtype)
        self.model.to(device)
        self.optimizer = adamw([each for each in self.model.parameters() if each.requires_grad], lr)

    def logprobs(self, row: Mapping[str, Any]) -> Tensor:
        """Of a row's response tokens, in float32."""
        tokens_1T = torch.tensor([row["tokens"]], device=self.device)
        logits = self.model(tokens_1T).logits.float()
        found: Tensor = response_logprobs(lambda _: _Logits(logits), tokens_1T, row["response_length"])[0]
        return found

    @torch.no_grad()
    def scored(self, rows: Rows) -> dict[str, Tensor]:
        """Log-probabilities of each row, by its sample."""
        return {row["sample_id"]: self.logprobs(row).cpu() for row in rows}

    def loss(self, rows: Rows) -> Tensor:
        """Of a step whose samples the present weights made."""
        losses = []
        for row in rows:
            new_R = self.logprobs(row)
            advantage, mask = (
                torch.tensor([row[key]], dtype=torch.float32, device=self.device)
                for key in ("advantage", "loss_mask")
            )
            losses.append(grpo_loss(new_R[None], new_R.detach()[None], advantage, mask))
        return torch.stack(losses).mean()

    def step(self, rows: Rows, clip_grad: float) -> float:
        """An optimizer step; returns the gradient's norm before it is clipped."""
        return clipped_step(self.loss(rows), self.optimizer, clip_grad)

    def gradients(self, rows: Rows, folder: Path) -> dict[str, Tensor]:
        """Gradients of a step by names of stored tensors; the weights are left as they were. folder: for its files."""
        self.optimizer.zero_grad()
        self.loss(rows).backward()
        kept = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)
            self.model.save_pretrained(folder)
            for name, parameter in self.model.named_parameters():
                parameter.copy_(kept[name])
        return stored(folder)


@dataclass
class _Logits:
    logits: Tensor


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder."""
    return {k: v.float() for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def trainer_logprobs(rank: Any, url: str, wider: bool) -> dict[str, Tensor]:
    """Log-probabilities of a batch's samples under a rank's weights; from the last pipeline stage, {} of others.

    wider: computed in the next wider type than the weights'.
    """
    with rank._working("score"):
        packs = make_packs(
            rank._read(url), rank.config, rank.learner.architecture, rank.device, rank.learner.place
        )
        passes = rank.learner.passes
        values = (passes.wider_logprobs if wider else passes.logprobs)(packs)
    if values is None:
        return {}
    rows = [row for pack in packs for row in pack.rows]
    parts = values.float().cpu().split([row.response_length for row in rows])
    return {row.sample_id: part for row, part in zip(rows, parts, strict=True)}


def trainer_gradients(rank: Any, url: str, folder: str) -> None:
    """Export the gradients of a step as if they were the weights, which are left as they were."""
    rows = rank._read(url)
    with rank._working("train"), torch.no_grad():
        with torch.enable_grad():
            rank.learner.forward_backward(rank.learner.rank_batch(1, url, rows), 1)
        trained = [parameter for parameter in rank.policy.parameters() if parameter.requires_grad]
        kept = [parameter.detach().clone() for parameter in trained]
        for parameter in trained:
            parameter.copy_(parameter.main_grad)
    rank.export(folder, 0)
    with rank._working("train"), torch.no_grad():
        for parameter, before in zip(trained, kept, strict=True):
            parameter.copy_(before)


def gaps(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, float]:
    """Mean and largest absolute difference of log-probabilities."""
    assert found.keys() == expected.keys()
    each = torch.cat([(found[name] - expected[name]).abs() for name in expected])
    return float(each.mean()), float(each.max())


def far_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """By tensor, the norm of the difference over the gradient's norm, or over a thousandth of the largest tensor's if that is more."""
    assert sorted(found) == sorted(expected)
    least = 1e-3 * max(float(each.norm()) for each in expected.values())
    return {
        name: float((found[name] - each).norm()) / max(float(each.norm()), least)
        for name, each in expected.items()
        if not name.endswith(ROUTER_BIAS)
    }


Everywhere = Callable[..., list[Any]]
"""Calls a function of a rank, with more arguments, on every rank; returns what each gives."""


LORA = {"rank": 8, "alpha": 16}
FSDP_SPLITS: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # a family, its sizes, and two ranks' settings
    "data": ("qwen3", {}, {}),
    "context": ("qwen3", {}, {"parallel": {"context": 2}}),
    "context, one key head, windows": (
        "mistral",
        {"num_key_value_heads": 1, "sliding_window": 8},
        {"parallel": {"context": 2}, "recompute": "full"},
    ),
    "context, experts": ("qwen3_moe", {}, {"parallel": {"context": 2}}),
    "copies": ("qwen3", {}, {"parallel": {"replicate": 2}}),
    "optimizer on the host": ("qwen3", {}, {"optimizer": {"offload": 1.0}}),
    "a half of the optimizer on the host, copies": (
        "qwen3",
        {"tie_word_embeddings": True},
        {"optimizer": {"offload": 0.5}, "parallel": {"replicate": 2}},
    ),
}


def settings(folder: Path, device: str, world: int = 1, **changes: Any) -> dict[str, Any]:
    """A trainer in bfloat16 of packs with several long sequences."""
    given: dict[str, Any] = {"dtype": "bfloat16", "device": device, "max_pack_tokens": 256, **changes}
    return trainer_ranks.configuration(folder, world, **given)


def split(
    name: str, device: str, into: Path, **changes: Any
) -> tuple[dict[str, Any], Path, list[tuple[str, Rows]]]:
    """One of FSDP_SPLITS: the configuration of its two ranks, the folder of its model, and two steps."""
    family, model, given = FSDP_SPLITS[name]
    folder = save_model(into / "model", family, **model)
    return settings(folder, device, 2, kind="fsdp", **{**given, **changes}), folder, batches(into)


def batches(folder: Path) -> list[tuple[str, Rows]]:
    """Two steps: where each is stored, and its rows."""
    rows = [trainer_ranks.samples(step, longest=LONGEST) for step in (1, 2)]
    return [
        (trainer_ranks.write_batch(folder / f"batch-{step}", each), each)
        for step, each in enumerate(rows, start=1)
    ]


def check_logprobs(everywhere: Everywhere, folder: Path, steps: list[tuple[str, Rows]], device: str) -> None:
    """Log-probabilities of a trainer that holds a folder's weights are those of Hugging Face's class."""
    url, rows = steps[0]
    exact = PlainModel(folder, torch.float32, device).scored(rows)
    rounded = PlainModel(folder, torch.bfloat16, device).scored(rows)
    narrow, wide = (_of_all(everywhere(trainer_logprobs, url, wider)) for wider in (False, True))
    found = {"trainer": gaps(narrow, exact)[0], "plain": gaps(rounded, exact)[0]}
    again = _of_all(everywhere(trainer_logprobs, url, False))
    # the first step compares with what the same weights scored: any difference is refused
    assert [name for name in narrow if not torch.equal(narrow[name], again[name])] == []
    print(f"mean differences from float32 {found}, largest of the trainer in float32 {gaps(wide, exact)[1]}")
    assert gaps(wide, exact)[1] < EXACT
    assert found["trainer"] < 2 * found["plain"] + 2e-3


def check_gradients(
    everywhere: Everywhere, folder: Path, steps: list[tuple[str, Rows]], device: str, into: Path
) -> None:
    """Gradients of a step are those of Hugging Face's class in float32. folder: of a `smooth` model; into: for files."""
    url, rows = steps[0]
    expected = PlainModel(folder, torch.float32, device).gradients(rows, into / "plain")
    rounded = PlainModel(folder, torch.bfloat16, device).gradients(rows, into / "rounded")
    everywhere(trainer_gradients, url, str(into / "trainer"))
    far = far_gradients(stored(into / "trainer"), expected)
    limits = {
        name: max(GRADIENTS, ROUNDED * distance)
        for name, distance in far_gradients(rounded, expected).items()
    }
    beyond = {name: (distance, limits[name]) for name, distance in far.items() if distance > limits[name]}
    assert not beyond, beyond


def check_steps(
    everywhere: Everywhere, folder: Path, steps: list[tuple[str, Rows]], device: str, into: Path
) -> None:
    """Steps have the gradient norms of Hugging Face's class with AdamW; its class loads what is exported, and agrees."""
    plain = PlainModel(folder, torch.float32, device)
    for version, (url, rows) in enumerate(steps, start=1):
        norm = everywhere(trainer_step, version, url)[0]
        assert norm == pytest.approx(plain.step(rows, trainer_ranks.CLIP_GRAD), rel=NORMS)
    url, rows = steps[0]
    everywhere(trainer_export, str(into / "export"), len(steps))
    exact = PlainModel(into / "export", torch.float32, device).scored(rows)
    assert gaps(_of_all(everywhere(trainer_logprobs, url, True)), exact)[1] < EXACT
    first, last = stored(folder), stored(into / "export")
    assert {name: each.shape for name, each in first.items()} == {
        name: each.shape for name, each in last.items()
    }
    # steps move the numbers of a norm, which are near 1, by less than bfloat16 tells apart
    assert [name for name in first if first[name].ndim > 1 and torch.equal(first[name], last[name])] == []


def check_adapters(
    everywhere: Everywhere, folder: Path, steps: list[tuple[str, Rows]], device: str, into: Path
) -> None:
    """Steps have the gradient norms of plain pairs beside Hugging Face's class, and the exported pairs its log-probabilities."""
    everywhere(trainer_export, str(into / "first"), 0)
    plain = PlainModel(folder, torch.float32, device, adapters=into / "first")
    for version, (url, rows) in enumerate(steps, start=1):
        norm = everywhere(trainer_step, version, url)[0]
        assert norm == pytest.approx(plain.step(rows, trainer_ranks.CLIP_GRAD), rel=NORMS)
    url, rows = steps[0]
    everywhere(trainer_export, str(into / "last"), len(steps))
    exact = PlainModel(folder, torch.float32, device, adapters=into / "last").scored(rows)
    assert gaps(_of_all(everywhere(trainer_logprobs, url, True)), exact)[1] < EXACT
    assert gaps(exact, PlainModel(folder, torch.float32, device).scored(rows))[1] > 1e-3, "they moved"


def trainer_step(rank: Any, version: int, url: str) -> float:
    """Make a step; returns its gradient's norm."""
    norm: float = rank.train(StepRequest(version, url))["grad_norm"]
    return norm


def trainer_export(rank: Any, folder: str, version: int) -> None:
    """Write the weights as a Hugging Face folder."""
    rank.export(folder, version)


def _of_all(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}
