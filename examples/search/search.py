"""Search-R1 in small: the policy looks facts up in a corpus of invented places, and learns to."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "search-files" / "corpus.txt"
LANDS = 1000


def search(query: str) -> str:
    """Find the fact that has most words in common with the query.

    Args:
        query: What to look for, such as: capital of boda
    """
    words = set(query.split())
    return max(_corpus(), key=lambda fact: len(words & _words(fact)))


def problem(rng: random.Random) -> dict[str, Any]:
    """A question of one lookup or two. Of the dialogues to warm up on a third are right; others guess, or look up too little."""
    if not CORPUS.exists():
        _write_corpus()
    at = 2 * rng.randrange(LANDS)
    capital, river = _corpus()[at : at + 2]
    (about_capital, city), (about_river, name) = capital.split(" is "), river.split(" is ")
    guess = [rng.choice(_corpus()).split(" is ")[1]]
    if rng.random() < 0.5:
        both = [f"search(query={about_capital})", capital, f"search(query={about_river})", river, name]
        dialogue = rng.choice([both, [*both[:2], city], guess])
        return {"prompt": f"river of {about_capital}", "label": name, "dialogue": dialogue}
    about, label = rng.choice([(about_capital, city), (about_river, name)])
    looked_up = rng.choice([about, about.split()[0], None])
    if looked_up is None:
        return {"prompt": about, "label": label, "dialogue": guess}
    found = search(looked_up)
    dialogue = [f"search(query={looked_up})", found, found.split(" is ")[1]]
    return {"prompt": about, "label": label, "dialogue": dialogue}


def _write_corpus() -> None:
    """Two facts of each land: its capital, and the river there. The names are invented, and always the same."""
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvw" for vowel in "aeiou"]
    names = random.Random(0).sample([a + b for a in syllables for b in syllables], 3 * LANDS)
    facts = [
        f"capital of {land} is {city}\nriver of {city} is {river}\n"
        for land, city, river in zip(*[iter(names)] * 3, strict=True)
    ]
    CORPUS.parent.mkdir(exist_ok=True)
    partial = CORPUS.with_name(f"corpus-{os.getpid()}.txt")
    partial.write_text("".join(facts))
    partial.rename(CORPUS)  # whole, whoever reads it meanwhile


@cache
def _corpus() -> list[str]:
    return CORPUS.read_text().splitlines()


@cache
def _words(fact: str) -> set[str]:
    return set(fact.split())
