"""`python -m tests.house.words [FOLDER ...]`: print each place where docstrings, comments and messages read like a translation.

Seven constructions are counted per 10,000 words of the product's docstrings and comments. Plain English has other words for them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import SourceFile, read_source

MOST_PER_10000 = 3.0
CONSTRUCTIONS = {  # name: how it is found, and what to write
    "those that": (r"\b(?:those (?:that|which|who|of|in|with)|one (?:that|which|who))\b", "the noun again"),
    "where for if": (
        r"\bwhere (?:it|there|nothing|nobody|none|no|one|they|a|an|the|that|this|these|what|all|both|some|any|each|several)\b",
        "if, when",
    ),
    "begin": (r"\b(?:begin|begins|began|begun|beginning)\b", "start"),
    "opens with Of": (
        r"(?-i:(?:^|[.:;!?]\s+|\n\s*)Of (?:a|an|the|all|each|its|what|those|these|this|that|one|every|several|any|two)\b)",
        "the subject first",
    ),
    "of its own": (
        r"\bof (?:its|his|their|her|our|my|your|one's) own\b|\bof (?:yours|ours|theirs|mine)\b",
        "its, your",
    ),
    "in place of": (
        r"\bin place of\b|\ball the same\b|\bas (?:it|they) (?:is|are)\b(?! (?:not|now|in|on))",
        "instead of, still, unchanged",
    ),
    "whoever": (r"\b(?:whoever|whatever|whichever|whomever)\b", "the caller, any"),
}


@dataclass(frozen=True, order=True)
class Found:
    """One construction in one sentence."""

    path: str
    line: int
    construction: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.construction} ({CONSTRUCTIONS[self.construction][1]}): {self.text}"


def texts(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Docstrings and comments, with the line where each starts."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def found_in(path: str, line: int, text: str) -> Iterator[Found]:
    """The constructions of one docstring or comment."""
    for name, (pattern, _) in CONSTRUCTIONS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            start, end = max(0, match.start() - 50), match.end() + 50
            around = " ".join(text[start:end].split())
            yield Found(path, line + text[: match.end()].count("\n"), name, around)


def counted(files: Iterable[SourceFile]) -> tuple[int, list[Found]]:
    """Words of all docstrings and comments of the product, and the constructions found in them."""
    words, found = 0, []
    for file in files:
        if file.is_test or file.path.startswith(("benchmarks/", "examples/")):
            continue
        for line, text in texts(file):
            words += len(text.split())
            found += found_in(file.path, line, text)
    return words, found


def main() -> None:
    """Print the places below the named folders, all of them if none is named, then the rates of the whole product."""
    words, found = counted(read_source(Path(__file__).parents[2]))
    for each in sorted(found):
        if each.path.startswith(tuple(sys.argv[1:] or [""])):
            print(each)
    counts = Counter(each.construction for each in found)
    for name in CONSTRUCTIONS:
        print(f"{name:15} {counts[name]:5} {counts[name] / words * 10_000:6.1f} per 10,000 words")


if __name__ == "__main__":
    main()
