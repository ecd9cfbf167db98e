"""Checks that a served teacher tokenises text as the model's tokenizer does.

Sends a few fixed texts to the server, which returns their tokens with its log-probabilities. Sends no token ids, since an id
beyond the vocabulary crashes some servers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from millrace.connectors.teachers.served_teacher import PromptToken, ServedTeacher

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "1234567890 + 98.76 = 3.14159e-7, isn't it?",
    "def f(x):\n    return [i ** 2 for i in x]  # a list\n\n\n",
    "\\frac{a}{b} \\leq \\sum_{n=1}^{\\infty} x_n",
    "Größe, señor, naïve; Привет, мир; 你好,世界; こんにちは",
    "internationalisation counterrevolutionaries antidisestablishment",
)
SPECIALS = 16  # added tokens to test, from the first and the last ones


async def differing_text(teacher: ServedTeacher, tokenizer: Any) -> str | None:
    """The first text that the server tokenises differently from `tokenizer`, of the tokenizers library; None if all agree.

    tokenizer: None if the model's has another format and cannot be compared.
    Raises UnprovenError if nothing could be compared, unless `same_tokenizer` is set; RemoteRewardError as ServedTeacher does.
    """
    compared = 0
    for text in (*TEXTS, *_specials(tokenizer)) if tokenizer is not None else ():
        shown = await teacher.tokenised(text)
        same = [_same(shown, tokenizer, text, special) for special in (True, False)]
        if None in same:
            continue
        if True not in same:
            return text
        compared += 1
    if not compared and not teacher.server.same_tokenizer:
        raise UnprovenError
    return None


class UnprovenError(Exception):
    """The server does not return the tokens of a text."""


def _specials(tokenizer: Any) -> Iterator[str]:
    """The texts of added tokens, whose ids are mostly the last of the vocabulary."""
    added = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    half = SPECIALS // 2
    for token in added if len(added) <= SPECIALS else added[:half] + added[-half:]:
        yield f"a{token}b"


def _same(shown: Sequence[PromptToken], tokenizer: Any, text: str, special: bool) -> bool | None:
    """Whether these are the tokenizer's ids of a text, with or without the special tokens that it adds.

    None if the server returns too little to tell. SGLang and the openai protocol return all tokens; vLLM omits the first.
    """
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    if len(shown) != len(ids):
        return False
    pairs = [(token.id, own) for token, own in zip(shown, ids, strict=True) if token.id is not None]
    if pairs:
        return all(one == own for one, own in pairs)
    texts = [(token.text, own) for token, own in zip(shown, ids, strict=True) if token.text is not None]
    plain = [(one, tokenizer.decode([own], skip_special_tokens=False)) for one, own in texts]
    comparable = [(_bare(one), _bare(own)) for one, own in plain if own.isascii() and own.strip()]
    if not comparable or all(one.startswith("token_id:") for one, _ in comparable):
        return None
    return all(one == own for one, own in comparable)


def _bare(text: str) -> str:
    """A token's text without the marks that vocabularies use for a space."""
    return text.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").strip()
