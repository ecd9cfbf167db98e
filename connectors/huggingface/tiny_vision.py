"""Tiny random models that see pictures, with a tokenizer of one token a character and a picture's marks, built locally."""

import json
from pathlib import Path
from typing import Any

from millrace.connectors.huggingface.tiny import CHARACTERS, SPECIAL, tokenizer_of

MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
TOKENS = [*SPECIAL, *dict.fromkeys(CHARACTERS), *MARKS]
VOCABULARY = 104
assert len(TOKENS) <= VOCABULARY


def mark(name: str) -> int:
    """A mark's token id."""
    return TOKENS.index(name)


def build_tiny_vision(
    folder: str | Path,
    kind: str,
    *,
    most: int = 16,
    seed: int = 0,
    hidden: int = 64,
    head_dim: int = 16,
    layers: int = 2,
    deep: int = 1,
    contrast: float = 4,
) -> Path:
    """Write a model, its processor's settings and its tokenizer; returns the folder.

    most: tokens of a picture. head_dim: of the language model and of the tower's two heads. layers: of the language model.
    deep: layers of a Qwen3-VL's tower that add to the first layers of the language model; SGLang wants three.
    contrast: how many times the usual start the tower's weights are, so that what is seen shows.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    patch = 14 if kind == "qwen2_5_vl" else 16
    sections = [head_dim // 4, head_dim // 8, head_dim // 8]
    rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": rotary if kind == "qwen2_5_vl" else {**rotary, "mrope_interleaved": True},
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {"depth": max(2, deep), "num_heads": 2}
    vision |= {"hidden_size": 2 * head_dim, "intermediate_size": 3 * head_dim}
    vision |= {"out_hidden_size": hidden, "patch_size": patch}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    else:
        text["head_dim"] = head_dim
        vision |= {"deepstack_visual_indexes": [*range(deep)], "num_position_embeddings": 64}
    if kind == "qwen3_vl_moe":
        text |= {**EXPERTS, "moe_intermediate_size": 3 * hidden // 4, "tie_word_embeddings": False}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = dict(zip(ids, map(mark, MARKS), strict=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **marks)
        model = AutoModelForImageTextToText.from_config(config)
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                weights.data.mul_(contrast if "visual" in name else 2)
    target = Path(folder)
    model.save_pretrained(target)
    put_inputs_first(target / "model.safetensors")
    build_tokenizer().save_pretrained(target)
    side = 2 * patch
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": side**2, "longest_edge": most * side**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (target / "preprocessor_config.json").write_text(json.dumps(settings))
    return target


def put_inputs_first(file: Path) -> None:
    """Store experts as they are published: transformers writes them with their outputs first."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    experts = [name for name in tensors if ".mlp.experts." in name]
    if experts:
        turned = {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
        save_file(tensors | turned, file, metadata={"format": "pt"})


def build_tokenizer() -> Any:
    """One token a character, as the tiny text model has, and the marks after them."""
    roles = ["<system>", "<user>", "<assistant>"]
    return tokenizer_of(TOKENS, [*roles, *MARKS], TEMPLATE)
