"""The account of an iteration: generated + carried = trained + masked + dropped + deferred + returned + in flight. Pure.

It counts tokens and samples. What one iteration defers is carried to the next; over a whole run the two cancel.

The left side is counted from what engines answered: rollout parts, or turns where rollouts have several. The right side is
counted from what the verdicts and the batch say became of it, so that a sample without a verdict, a sample generated twice,
or a batch with other tokens than were generated shows as a difference.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

Fate = Literal["trained", "masked", "dropped", "deferred", "returned", "in flight"]
FATES: tuple[Fate, ...] = get_args(Fate)
UNVERSIONED = -1  # tokens whose weight version is not stored
QUANTILES = (0.5, 0.9, 0.99)
SHOWN = 3  # samples that a problem names
Where = tuple[Fate, str, int]
"""What became of tokens, what dropped them (else empty), and the weight version that generated them."""


@dataclass
class Account:
    """Counts of one iteration, or of several that were added.

    generated: tokens by weight version, and samples. carried: tokens and samples that the previous iteration deferred to
    this one. tokens, samples: what became of them. again: tokens and samples of earlier
    iterations that were trained once more; they are in those iterations' accounts. lengths: samples by the number of
    their policy tokens, trained ones under True.
    """

    generated: Counter[int] = field(default_factory=Counter)
    generated_samples: int = 0
    carried: Counter[int] = field(default_factory=Counter)
    carried_samples: int = 0
    tokens: Counter[Where] = field(default_factory=Counter)
    samples: Counter[tuple[Fate, str]] = field(default_factory=Counter)
    again_tokens: int = 0
    again_samples: int = 0
    lengths: dict[bool, Counter[int]] = field(default_factory=lambda: {True: Counter(), False: Counter()})
    strays: list[str] = field(default_factory=list)  # samples that no verdict, or several rows, speak of

    def add(self, other: Account) -> None:
        """Add the counts of another iteration."""
        self.generated.update(other.generated)
        self.generated_samples += other.generated_samples
        self.carried.update(other.carried)
        self.carried_samples += other.carried_samples
        self.tokens.update(other.tokens)
        self.samples.update(other.samples)
        self.again_tokens += other.again_tokens
        self.again_samples += other.again_samples
        for trained, lengths in other.lengths.items():
            self.lengths[trained].update(lengths)
        self.strays += other.strays

    def tokens_of(self, fate: Fate) -> int:
        """Tokens that ended with this fate."""
        return sum(count for (each, _, _), count in self.tokens.items() if each == fate)

    def samples_of(self, fate: Fate) -> int:
        """Samples that ended with this fate."""
        return sum(count for (each, _), count in self.samples.items() if each == fate)

    def dropped_tokens(self) -> dict[str, int]:
        """Dropped tokens by what dropped them."""
        found: Counter[str] = Counter()
        for (fate, cause, _), count in self.tokens.items():
            if fate == "dropped":
                found[cause] += count
        return dict(sorted(found.items()))

    def quantiles(self, trained: bool) -> dict[str, float]:
        """Quantiles of the lengths of samples that are trained, or of the others; empty if there are none."""
        lengths = self.lengths[trained]
        if not lengths:
            return {}
        each = np.repeat(np.array(list(lengths), np.int32), list(lengths.values()))
        values = np.quantile(each, QUANTILES)
        return {f"p{share * 100:g}": float(value) for share, value in zip(QUANTILES, values, strict=True)}

    def problems(self) -> list[str]:
        """Why the account does not close; empty if it closes."""
        found = []
        accounted: Counter[int] = Counter()
        for (_, _, version), count in self.tokens.items():
            accounted[version] += count
        for version in sorted(self.generated.keys() | self.carried.keys() | accounted.keys()):
            made, known = self.generated[version] + self.carried[version], accounted[version]
            of = "no stored version" if version == UNVERSIONED else f"weight version {version}"
            if made != known:
                found.append(f"{made} tokens of {of} were generated, {known} are accounted for")
            if self.generated[version] < 0:
                found.append(
                    f"samples have {-self.generated[version]} tokens of {of} fewer than were carried here"
                )
        for (fate, _, version), count in sorted(self.tokens.items()):
            if count < 0:
                found.append(
                    f"more tokens of weight version {version} were trained than generated: {fate} {count}"
                )
        made, known = self.generated_samples + self.carried_samples, sum(self.samples.values())
        if made != known:
            found.append(f"{made} samples were generated, {known} are accounted for")
        if self.strays:
            more = f" and {len(self.strays) - SHOWN} more" if len(self.strays) > SHOWN else ""
            found.append(f"without one verdict: {', '.join(sorted(self.strays)[:SHOWN])}{more}")
        return found

    def rows(self) -> list[dict[str, str | int]]:
        """What became of the tokens, a row for each fate, cause and weight version."""
        return [
            {"fate": fate, "dropped_by": cause, "version": version, "tokens": count}
            for (fate, cause, version), count in sorted(self.tokens.items())
            if count
        ]

    def metrics(self) -> dict[str, float]:
        """The account as metrics, tokens/*. Quantiles of no samples are left out."""
        generated = sum(self.generated.values())
        found = {"tokens/generated": float(generated)}
        for fate in ("trained", "masked", "dropped", "deferred", "returned"):
            found[f"tokens/{fate}"] = float(self.tokens_of(fate))
        for cause, count in self.dropped_tokens().items():
            found[f"tokens/dropped_{cause or 'unknown'}"] = float(count)
        if generated:
            found["tokens/trained_share"] = self.tokens_of("trained") / generated
        if self.carried_samples:
            found["tokens/carried"] = float(sum(self.carried.values()))
        if self.again_samples:
            found["tokens/trained_again"] = float(self.again_tokens)
        for trained, name in ((True, "trained"), (False, "untrained")):
            for quantile, value in self.quantiles(trained).items():
                found[f"tokens/{name}_length_{quantile}"] = value
        return found
