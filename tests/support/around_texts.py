"""Tiny tokenizers of one token a byte: with what they put around a text, and with padding and truncation saved in their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, TURN = "<|bos|>", "<|eos|>", "<|turn|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def raw_tokenizer() -> Tokenizer:
    """One that puts nothing around a text."""
    vocab = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, TURN)])
    return raw


def template(single: str) -> Any:
    """Puts special tokens around a text, which is $A."""
    ids = [(BOS, 256), (EOS, 257), (TURN, 258)]
    return processors.TemplateProcessing(
        single=single, special_tokens=[each for each in ids if each[0] in single]
    )


def save_tokenizer(folder: Path, raw: Tokenizer, chat_template: str = TEMPLATE) -> None:
    """The files of a tokenizer. Padding and truncation stay as they are in it: transformers itself saves none."""
    kept = raw.to_str()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=EOS, bos_token=BOS, chat_template=chat_template
    )
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(kept)
