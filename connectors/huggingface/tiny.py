"""A tiny Qwen3 model and tokenizer, built locally for the quickstart, tests and benchmarks.

The folder holds everything that a Hugging Face checkpoint has, and is loaded like any other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-*/=() .,:?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
SPECIAL = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL_TEMPLATE = (  # starts with the tools' names and parameters, and writes a call as `name(parameter=value)`
    "{% if tools %}<system>{% for tool in tools %}{{ tool['function']['name'] }}"
    "({{ tool['function']['parameters']['properties'] | join(',') }}){% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function']['name'] }}("
    "{% for name, value in call['function']['arguments'] | items %}{{ name }}={{ value }}"
    "{% if not loop.last %},{% endif %}{% endfor %}){% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE_TEMPLATE: dict[str, Any] = {  # parses such calls
    "start_anchor": "<assistant>",
    "defaults": {"role": "assistant"},
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>[a-z_]+)\(",
            "close": ")",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>[a-z_]+)=(?P<value>[^,]*)"},
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<eos>", "repeats": True, "join": ""},
    },
}


def build_tiny_model(
    folder: str | Path,
    *,
    hidden_size: int = 96,
    intermediate_size: int = 192,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 96,
    experts: int = 0,
    tie_word_embeddings: bool = True,
    max_positions: int = 2048,
    tools: bool = False,
    seed: int = 0,
) -> Path:
    """Write a randomly initialised Qwen3 (Qwen3-MoE if `experts`) with a character-level tokenizer; returns the folder.

    tools: the chat template shows tools, and tool calls can be parsed.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging as progress

    assert vocab_size > len(CHARACTERS) + len(SPECIAL)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie_word_embeddings,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            moe: dict[str, Any] = {
                "num_experts": experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": intermediate_size,
            }
            model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **moe, norm_topk_prob=True))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
    target = Path(folder)
    progress.disable_progress_bar()  # of no use for one small file
    model.save_pretrained(target)
    build_tokenizer(tools).save_pretrained(target)
    return target


def build_tokenizer(tools: bool = False) -> Any:
    """A tokenizer with one token per character, and role tokens for its chat template."""
    roles = ["<system>", "<user>", "<assistant>", *(["<tool>"] if tools else [])]
    # the tool's role is last, so that the other tokens have the same ids with and without it
    return tokenizer_of(
        list(dict.fromkeys([*SPECIAL, *CHARACTERS, *roles])),
        roles,
        TOOL_TEMPLATE if tools else CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE if tools else None,
    )


def tokenizer_of(tokens: Sequence[str], additional: Sequence[str], template: str, **settings: Any) -> Any:
    """A tokenizer of these tokens, one a character but for the special ones. additional: which are special beside padding and ends."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(additional),
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **settings,
    )
