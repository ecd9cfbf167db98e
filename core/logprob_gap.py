"""How far the log-probabilities of engine and trainer may differ, and the likely cause of a difference. Pure.

Two computations of one model in one type differ by rounding. How much that is depends on the model, its type and how sure it
is:
0.004 nats a token for a tiny random model in bfloat16, 0.04 for a pretrained one. So it is measured: the trainer computes some
samples a second time, one type wider, and the mean absolute difference of these two computations is the rounding floor.
`benchmarks.logprob_gap` shows what the factor between floor and limit passes and refuses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MULTIPLE = 3.0  # the limit in rounding floors: engines that are right reach 1.5, see `benchmarks.logprob_gap`
LEAST = 1e-4  # nats: a ratio that is off by 0.01 % does not matter to a loss that clips it at 20 %
SAMPLES, AGAIN = 16, 64  # samples computed twice: at first, and before a step is refused

FEWEST = 16  # fewest tokens in which a pattern is looked for
UNEXPLAINED = 0.25  # share of the squared difference left by a fit of another temperature: 0.06 if that is the cause, else 0.7
# lowest slope of the fit: an engine that knows next to nothing looks like a very high temperature
FLATTEST = -0.6
STRANGE = 3.0  # nats: no other temperature makes tokens so much less likely than the trainer's own
GROWTH = 2.5  # growth of the difference from the first quarter of the positions to the last

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LogprobGuard:
    """The check of an iteration's steps before its first update."""

    limit: float | None = None  # largest mean difference, nats a token; None: measured
    floor: float | None = None  # the rounding floor that the run measured; None: not yet

    def allows(self, floor: float) -> float:
        """The largest mean difference allowed with this rounding floor."""
        return self.limit if self.limit is not None else max(LEAST, MULTIPLE * floor)


def chosen_samples(lengths: Sequence[int], most: int, tokens: int) -> list[int]:
    """Samples to compute twice: at most `most`, at least one, spread evenly, until they have `tokens` tokens."""
    found: list[int] = []
    left = tokens
    for index in sorted({int(place) for place in np.linspace(0, len(lengths) - 1, min(most, len(lengths)))}):
        if not found or lengths[index] <= left:
            found.append(index)
            left -= lengths[index]
    return found


@dataclass(frozen=True)
class Tokens:
    """Compared tokens [N] of S samples."""

    engine: Floats  # [N] log-probabilities
    trainer: Floats  # [N]
    entropy: Floats  # [N] of the trainer's distribution, nats
    sample: npt.NDArray[np.int64]  # [N] index
    position: npt.NDArray[np.int64]  # tokens before it, prompt included
    engine_of: Sequence[str]  # [S] id of the engine that made a sample

    @property
    def gap(self) -> Floats:
        """Absolute differences [N]."""
        distance: Floats = np.abs(self.engine - self.trainer)
        return distance


@dataclass(frozen=True)
class Cause:
    """The likely cause of a difference."""

    kind: str  # one of KINDS
    seen: str  # the evidence
    remedy: str


KINDS = (
    "not a number",
    "one engine",
    "temperature",
    "few samples",
    "position",
    "another model",
    "weights or type",
)
_RESENT = "the next start of the run sends every engine the weights again"


def likely_cause(tokens: Tokens, limit: float, temperature: float) -> Cause:
    """The first of KINDS that fits the differences. temperature: by which the trainer divides logits."""
    gap = tokens.gap
    if not np.isfinite(gap).all():
        bad = int((~np.isfinite(gap)).sum())
        return Cause(
            "not a number",
            f"{bad} of {len(gap)} log-probabilities are not finite",
            "look for weights that are not finite: lower trainer.optimizer.lr, or branch from an earlier checkpoint",
        )
    for look in (_one_engine, _other_temperature, _few_samples, _position, _other_model):
        cause = look(tokens, limit, temperature)
        if cause is not None:
            return cause
    return Cause(
        "weights or type",
        "all samples are off alike, and rounding alone does not explain it: weights of another version, a tensor that did not "
        "arrive, or an engine that computes in another type (quantisation, another cache type)",
        f"{_RESENT}; sync.max_prompt_gap then compares them at each sync. If it comes again, set sync.kind=disk, or "
        "check the engine's own options",
    )


def _one_engine(tokens: Tokens, limit: float, _temperature: float) -> Cause | None:
    """Some engines are off, others are not."""
    engines = sorted({tokens.engine_of[index] for index in np.unique(tokens.sample)})
    if len(engines) < 2:
        return None
    made_by = np.array([engines.index(name) if name in engines else -1 for name in tokens.engine_of])[
        tokens.sample
    ]
    means = [float(tokens.gap[made_by == number].mean()) for number in range(len(engines))]
    off = [number for number, mean in enumerate(means) if mean > limit]
    if not off or len(off) == len(engines):
        return None
    named = ", ".join(
        f"{engines[number] or 'an engine without a name'} by {means[number]:.3g}" for number in off
    )
    rest = max(mean for number, mean in enumerate(means) if number not in off)
    return Cause(
        "one engine",
        f"of {len(engines)} engines only these are off: {named}; the others by {rest:.3g} at most",
        f"{_RESENT}, those too",
    )


def _other_temperature(tokens: Tokens, _limit: float, temperature: float) -> Cause | None:
    """Dividing logits by T instead of t moves a log-probability by about (t / T - 1)(log p + entropy)."""
    gap = tokens.engine - tokens.trainer
    moved = tokens.trainer + tokens.entropy
    if -float(moved.mean()) > STRANGE:
        return None
    scale = float((moved**2).sum())
    if not scale or len(gap) < FEWEST:
        return None
    slope = float((gap * moved).sum()) / scale
    unexplained = float(((gap - slope * moved) ** 2).sum()) / float((gap**2).sum())
    if abs(slope) < 0.02 or slope < FLATTEST or unexplained > UNEXPLAINED:
        return None
    return Cause(
        "temperature",
        f"it grows with how unlikely a token is, as if engines sampled at a temperature of about {temperature / (1 + slope):.2g}; "
        f"the trainer divides logits by {temperature:g} (rollout.sampling.temperature)",
        "have engines sample at that temperature: look for another one in engines.sglang, in an engine's own generation defaults, "
        "or in what your rollout function sends",
    )


def _few_samples(tokens: Tokens, limit: float, _temperature: float) -> Cause | None:
    """A minority of the samples is far off, the others are within the limit."""
    samples, place, counts = np.unique(tokens.sample, return_inverse=True, return_counts=True)
    means = np.bincount(place, tokens.gap) / counts
    off = means > limit
    if len(samples) < 4 or not 0 < off.sum() <= len(samples) / 2:
        return None
    rest = float(np.average(means[~off], weights=counts[~off]))
    if rest > limit / 2:
        return None
    return Cause(
        "few samples",
        f"{int(off.sum())} of {len(samples)} samples {'is' if off.sum() == 1 else 'are'} off, the others by {rest:.3g}: tokens or log-probabilities that are not "
        "what the engine made, or weights that changed while an engine answered",
        "look at what your rollout function, session or filter changes in a sample",
    )


def _position(tokens: Tokens, _limit: float, _temperature: float) -> Cause | None:
    """Late tokens are several times as far off as early ones."""
    if len(tokens.position) < 4 * FEWEST or np.ptp(tokens.position) < FEWEST:
        return None
    early, late = np.quantile(tokens.position, (0.25, 0.75))
    first, last = tokens.gap[tokens.position <= early].mean(), tokens.gap[tokens.position >= late].mean()
    if last < GROWTH * first:
        return None
    return Cause(
        "position",
        f"it grows along a sequence, from {first:.3g} to {last:.3g}: positions or rotary embeddings differ",
        "compare rope_theta and its scaling in the model's config.json with what the engine reports, and "
        "engines.sglang.context_length",
    )


def _other_model(tokens: Tokens, _limit: float, _temperature: float) -> Cause | None:
    """The trainer finds the engine's tokens far less likely than its own entropy says."""
    surprise = float(-(tokens.trainer + tokens.entropy).mean())
    if surprise < 1.0:
        return None
    return Cause(
        "another model",
        f"to the trainer the engine's tokens are {surprise:.2g} nats less likely than its own would be: the engine holds another "
        "model, or only a part of the weights",
        f"{_RESENT}; check that engines load the folder of model.path",
    )
