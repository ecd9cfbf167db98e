"""A reward for questions with lettered choices, such as GPQA (arXiv:2311.12022). Pure.

A response is read clause by clause: which letter it states, considers, or rules out. A letter that is ruled out, or stated with
others, is no answer.
"""

import re
from collections.abc import Sequence
from typing import Any

from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.rewards.math import last_boxed
from millrace.core.rewards.text import plain

LONGEST = 20_000  # last characters of a response that are read
L = r"[(\[{]?[A-Z][)\]}]?(?![\w'])"  # a letter, in brackets or not
LISTED = rf"\s*(?:or |and )?{L}\s*(?:,|\bor\b|\band\b|$|[.;?!])"
CLAUSE = re.compile(
    rf"[.;!?](?=\s|$)|\n|,\s+(?!{LISTED})|(?<!\ball )(?<!thing )\bbut\b|\bhowever\b|\bwhile\b|\bwhereas\b|\bbecause\b|\bsince\b"
    rf"|(?=\b(?:not|rather than|instead of|unlike)\s+(?:option |choice |answer )?{L})"
)
SPACE = re.compile(r"\s+")
LETTER = re.compile(r"(?<![\w'])([A-Z])(?![\w'])")
ARTICLE = re.compile(
    r"(?<![\w'(\[{])[AI] (?=[a-z])(?!(?:is|was|as|or|and|can|cannot|would|will|seems?|looks?|must|has|in|fails?|for|with|gives?|because|since)\b)"
)
LOWER = re.compile(
    r"(?i:\b(?:answer|option|choice)\b)\s*(?::|\bis\b)?:?\s*[*_$]{0,3}[(\[]?([a-z])[)\]]?(?=[*_$.,;!?\s]*$)|\(([a-z])\)"
)
AGAINST = re.compile(
    r"\b(?:not|never|(?:all|anything|everything) but|neither|nor|cannot|incorrect|wrong|false|unlikely|eliminat\w*|exclud\w*|reject\w*|discard\w*|dismiss\w*|"
    r"rul(?:e|es|ed|ing)\b.{0,40}?\bout|fail(?:s|ed)?|except|rather than|instead of|unlike|contradict\w*|impossible|invalid|without|"
    r"least likely|less likely|unable|doesn|isn|don|can't|won't)\b|n't\b",
    re.IGNORECASE,
)
UNSURE = re.compile(
    r"\b(?:could|might|may|maybe|perhaps|possibly|either|probably not|not sure|unsure|or|guess between|between|if)\b",
    re.IGNORECASE,
)
STATES = re.compile(
    r"\b(?:answer|answers|correct|right|choose|chose|choosing|pick|picked|picking|select|selected|selecting|settle[sd]?|conclude|final|"
    r"hence|therefore|thus|leaves|leaving|remains|go with|going with|must be|it is|it's)\b|\\boxed",
    re.IGNORECASE,
)
NOTE = re.compile(
    r"\b(?:vitamin|hepatitis|type|group|section|figure|fig|part|step|case|point|class|phase|plan|grade|equation|eq|appendix|protein|factor)\s+$",
    re.IGNORECASE,
)


def gpqa(sample: RewardInput, *, letters: str = "ABCD", choices_key: str = "choices") -> RewardResult:
    """1 if the response settles on the right letter, else 0; text before </think> does not count.

    The last statement counts (the answer is X, X is correct, a box), else the last letter that stands alone. A letter that is
    ruled out, or stated with others, does not count. The label is a letter, an index from 0, or the text of one of
    `metadata[choices_key]`. A response without a letter is right if it holds the text of the right choice alone.
    """
    text = sample.response.rpartition("</think>")[2][-LONGEST:]
    choices = sample.metadata.get(choices_key)
    texts = [str(choice) for choice in choices] if isinstance(choices, Sequence) else []
    letters = letters[: len(texts)] if texts else letters
    right = _right(sample.label, letters, texts)
    found = settled_on(text, letters)
    if found is None:
        held = [letter for letter, choice in zip(letters, texts, strict=False) if _holds(text, choice)]
        found = held[0] if len(held) == 1 and not AGAINST.search(text) else ""
    return RewardResult(float(found == right), answer=found)


def _one_space(found: re.Match[str]) -> str:
    """Replace a run of spaces by one: expressions with two adjacent runs of spaces take quadratic time on it."""
    return "\n" if "\n" in found[0] else " "


def settled_on(text: str, letters: str) -> str | None:
    """The letter that a text settles on; empty for none or several, None for a text without a letter."""
    text = SPACE.sub(_one_space, text)
    boxed = last_boxed(text)
    if boxed is not None:
        inside = _letters(
            re.sub(r"\\[a-z]+", " ", boxed).upper() if len(boxed.strip("(){}. ")) == 1 else boxed, letters
        )
        if inside:
            return inside[0] if len(inside) == 1 and not AGAINST.search(boxed) else ""
    if alone := re.fullmatch(r"\W*([a-z])\W*", text):
        return alone[1].upper() if alone[1].upper() in letters else None
    chosen, stated, seen = "", False, False
    for clause in CLAUSE.split(plain(text)):
        named = _letters(clause, letters)
        if not named:
            continue
        seen = True
        if AGAINST.search(clause):
            if chosen in named:
                chosen, stated = "", False
        elif len(named) > 1 or UNSURE.search(clause):
            if STATES.search(clause) or not stated:
                chosen, stated = "", bool(STATES.search(clause))
        elif STATES.search(clause) or not stated:
            chosen, stated = named[0], bool(STATES.search(clause))
    return chosen if seen else None


def _letters(clause: str, letters: str) -> list[str]:
    """The choices that a clause names, each once."""
    plainly = re.sub(r"\\(?:text\w*|math\w*|boxed)", " ", ARTICLE.sub("", clause))
    found = [
        match[1]
        for match in LETTER.finditer(plainly)
        if not NOTE.search(plainly[max(0, match.start() - 20) : match.start()])
    ]
    found += [(one or other).upper() for one, other in LOWER.findall(plainly)]
    return list(dict.fromkeys(letter for letter in found if letter in letters))


def _holds(text: str, choice: str) -> bool:
    """Whether the text of a choice stands in a text as whole words and numbers."""
    if not choice.strip():
        return False
    wanted = re.escape(choice.strip().casefold())
    return re.search(rf"(?<![\w.,-]){wanted}(?![\w]|[.,]\d)", text.casefold()) is not None


def _right(label: Any, letters: str, choices: list[str]) -> str:
    """The letter of the label. Errors: ValueError for a label without one: the data are wrong, not the response."""
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    plainly = str(label).strip().strip("()").upper()
    if len(plainly) == 1 and plainly in letters:
        return plainly
    folded = [choice.strip().casefold() for choice in choices]
    wanted = str(label).strip().casefold()
    if wanted in folded and folded.index(wanted) < len(letters):
        return letters[folded.index(wanted)]
    raise ValueError(f"label {str(label)[:40]!r} is no letter of {letters}, no index, and no choice")
