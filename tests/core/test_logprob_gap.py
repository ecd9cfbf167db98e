"""What a difference of engine and trainer looks like, and the limit that rounding gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.logprob_gap import (
    KINDS,
    LEAST,
    MULTIPLE,
    Floats,
    LogprobGuard,
    Tokens,
    chosen_samples,
    likely_cause,
)

LIMIT, VOCAB, LENGTH = 0.05, 50, 40


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def tokens(
    engine: Callable[[Floats, np.random.Generator], Floats],
    *,
    samples: int = 12,
    engines: Sequence[str] = ("engine-0",),
    temperature: float = 1.0,
) -> Tokens:
    """Samples that an engine made whose logits are a function of the trainer's [S, LENGTH, VOCAB]."""
    draw = np.random.default_rng(0)
    logits = 2.0 * draw.standard_normal((samples, LENGTH, VOCAB))
    ours = log_softmax(logits / temperature)
    theirs = log_softmax(engine(logits, draw))
    noise = draw.gumbel(size=theirs.shape)
    made = (theirs + noise).argmax(-1)[..., None]
    return Tokens(
        engine=np.take_along_axis(theirs, made, -1).ravel(),
        trainer=np.take_along_axis(ours, made, -1).ravel(),
        entropy=-(np.exp(ours) * ours).sum(-1).ravel(),
        sample=np.repeat(np.arange(samples), LENGTH),
        position=np.tile(np.arange(LENGTH) + 5, samples),
        engine_of=[engines[sample % len(engines)] for sample in range(samples)],
    )


def noise(scale: float) -> Callable[[Floats, np.random.Generator], Floats]:
    return lambda logits, draw: logits + scale * draw.standard_normal(logits.shape)


def of_samples(which: slice, scale: float) -> Callable[[Floats, np.random.Generator], Floats]:
    def changed(logits: Floats, draw: np.random.Generator) -> Floats:
        off = logits + 0.005 * draw.standard_normal(logits.shape)
        off[which] += scale * draw.standard_normal(off[which].shape)
        return off

    return changed


def growing(logits: Floats, draw: np.random.Generator) -> Floats:
    return logits + np.linspace(0.0, 1.0, LENGTH)[None, :, None] * draw.standard_normal(logits.shape)


def not_finite(found: Tokens) -> Tokens:
    return dataclasses.replace(
        found, engine=np.where(np.arange(len(found.engine)) == 3, math.nan, found.engine)
    )


TWO = ("engine-0", "engine-1")
CASES: dict[str, tuple[Tokens, str, str]] = {
    "temperature 0.7": (tokens(lambda x, _: x / 0.7), "temperature", "temperature of about 0.7"),
    "temperature 0.9": (tokens(lambda x, _: x / 0.9), "temperature", "temperature of about 0.9"),
    "temperature 1.3": (tokens(lambda x, _: x / 1.3), "temperature", "temperature of about 1.3"),
    "raw logits beside 0.8": (
        tokens(lambda x, _: x, temperature=0.8),
        "temperature",
        "divides logits by 0.8",
    ),
    "temperature and rounding": (
        tokens(lambda x, draw: x / 0.8 + 0.02 * draw.standard_normal(x.shape)),
        "temperature",
        "temperature of about 0.",
    ),
    "one engine of two": (
        tokens(of_samples(slice(0, None, 2), 0.5), engines=TWO),
        "one engine",
        "only these are off: engine-0 by",
    ),
    "the other engine": (
        tokens(of_samples(slice(1, None, 2), 0.5), engines=TWO),
        "one engine",
        "engine-1 by",
    ),
    "both engines": (tokens(noise(0.5), engines=TWO), "weights or type", "alike"),
    "one engine alone": (tokens(noise(0.5)), "weights or type", "alike"),
    "a narrower type": (tokens(noise(0.1)), "weights or type", "another type"),
    "two samples": (tokens(of_samples(slice(0, 2), 2.0)), "few samples", "2 of 12 samples are off"),
    "one sample": (tokens(of_samples(slice(5, 6), 3.0)), "few samples", "1 of 12 samples is off"),
    "positions": (tokens(growing), "position", "grows along a sequence"),
    "random weights": (
        tokens(lambda x, draw: 2.0 * draw.standard_normal(x.shape)),
        "another model",
        "another model",
    ),
    "no weights": (tokens(lambda x, _: 0.0 * x), "another model", "less likely"),
    "not a number": (not_finite(tokens(noise(0.001))), "not a number", "1 of 480 log-probabilities"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_named_with_its_evidence(name: str) -> None:
    found, kind, words = CASES[name]
    temperature = 0.8 if "0.8" in name and "raw" in name else 1.0
    cause = likely_cause(found, LIMIT, temperature)
    assert cause.kind == kind, cause
    assert words in cause.seen
    assert cause.remedy


def test_every_kind_has_a_case() -> None:
    assert {kind for _, kind, _ in CASES.values()} == set(KINDS)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_few_tokens_are_explained_too(count: int) -> None:
    whole = tokens(noise(0.5))
    cut = {
        name: getattr(whole, name)[:count] for name in ("engine", "trainer", "entropy", "sample", "position")
    }
    assert likely_cause(dataclasses.replace(whole, **cut), LIMIT, 1.0).kind in KINDS


def test_the_limit_follows_what_was_measured_unless_it_is_set() -> None:
    assert LogprobGuard().allows(0.03) == pytest.approx(MULTIPLE * 0.03)
    assert LogprobGuard().allows(1e-7) == LEAST
    assert LogprobGuard(limit=0.5).allows(0.03) == 0.5
    assert not LogprobGuard().allows(math.nan) >= 1.0


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=600), st.integers(1, 64), st.integers(1, 20_000))
def test_a_few_samples_are_chosen_evenly_within_the_tokens(
    lengths: list[int], most: int, budget: int
) -> None:
    chosen = chosen_samples(lengths, most, budget)
    assert chosen == sorted(set(chosen))
    assert 1 <= len(chosen) <= most
    assert all(0 <= index < len(lengths) for index in chosen)
    assert len(chosen) == 1 or sum(lengths[index] for index in chosen) <= budget
    if sum(lengths) <= budget and most >= len(lengths):
        assert len(chosen) == len(lengths)
