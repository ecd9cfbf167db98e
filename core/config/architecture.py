"""What of a Hugging Face config.json the rest of the configuration must agree with. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from core.config.problems import Problem
from core.config.run import RunConfig

SUPPORTED = ("qwen3", "qwen3_moe", "qwen2", "llama")


def model_problems(config: RunConfig, hf: Mapping[str, Any]) -> list[Problem]:
    """Where the model and the configuration do not fit."""
    kind = hf.get("model_type")
    if kind not in SUPPORTED:
        return [
            Problem(
                "model.path",
                config.model.path,
                f"holds a {kind} model",
                f"supported are {', '.join(SUPPORTED)}",
            )
        ]
    return [*_divided(config, hf), *_lengths(config, hf)]


def _divided(config: RunConfig, hf: Mapping[str, Any]) -> Iterator[Problem]:
    p = config.trainer.parallel
    heads = int(hf["num_attention_heads"])
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    for field, size, count, what in (
        ("tensor", p.tensor, heads, "attention heads"),
        ("tensor", p.tensor, kv_heads, "key-value heads"),
        ("pipeline", p.pipeline, int(hf["num_hidden_layers"]), "layers"),
        ("expert", p.expert, int(hf.get("num_experts") or 0), "experts"),
    ):
        if size > 1 and (not count or count % size):
            yield Problem(
                f"trainer.parallel.{field}",
                size,
                f"the model's {count} {what} do not divide by it",
                f"take a divisor of {count}" if count else "set it to 1",
            )


def _lengths(config: RunConfig, hf: Mapping[str, Any]) -> Iterator[Problem]:
    limit = int(hf.get("max_position_embeddings") or 0)
    sampled = [("rollout.sampling.max_new_tokens", config.rollout.sampling.max_new_tokens)]
    sampled += [
        (f"evaluation.sets.{at}.sampling.max_new_tokens", held_out.sampling.max_new_tokens)
        for at, held_out in enumerate(config.evaluation.sets)
    ]
    for field, response in sampled:
        longest = config.data.max_prompt_tokens + response
        if limit and longest > limit:
            yield Problem(
                field,
                response,
                f"with data.max_prompt_tokens = {config.data.max_prompt_tokens} a sample can have {longest} tokens, the model has "
                f"{limit} positions",
                "lower one of them",
            )


def parameters(hf: Mapping[str, Any]) -> int:
    """Parameters of the model, from its shape."""
    hidden, layers, vocab = int(hf["hidden_size"]), int(hf["num_hidden_layers"]), int(hf["vocab_size"])
    heads = int(hf["num_attention_heads"])
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    head = int(hf.get("head_dim") or hidden // heads)
    attention = hidden * head * (heads + 2 * kv_heads) + heads * head * hidden
    experts = int(hf.get("num_experts") or 0)
    width = int(hf.get("moe_intermediate_size") or 0) if experts else int(hf["intermediate_size"])
    mlp = 3 * hidden * width * max(1, experts) + hidden * experts
    embeddings = vocab * hidden * (1 if hf.get("tie_word_embeddings") else 2)
    return layers * (attention + mlp + 2 * hidden) + embeddings + hidden
