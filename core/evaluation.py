"""Figures of a held-out set: mean reward with its interval, pass@k and the majority's share, for all of it and by subset.

Also the names of the metrics of held-out sets.

An answer that could not be scored counts as wrong. A sample that failed to generate is in no figure.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.contracts.task_records import EvaluateRecord, HeldOutRecord
from millrace.core.metric_names import name_part

# figures of supervised runs; of all other figures the highest is best
LOWEST_IS_BEST = ("loss", "perplexity")
Z_95 = 1.959963984540054  # quantile of the standard normal distribution, two-sided


@dataclass(frozen=True)
class EvaluatedAnswer:
    """One answer to a prompt. `text`: what its reward found, for the majority; empty for no answer, None if not looked for."""

    prompt_id: str
    reward: float
    text: str | None
    subset: str | None = None


@dataclass(frozen=True)
class Figures:
    """Figures of a set or subset. `interval` is half of the 95 % interval of the mean; None with fewer than two prompts."""

    answers: int
    reward_mean: float | None
    interval: float | None
    pass_at: Mapping[int, float]
    majority: float | None


def figures(answers: Sequence[EvaluatedAnswer], correct_from: float) -> Figures:
    """Figures of these answers. correct_from: the reward from which an answer is correct."""
    prompts: dict[str, list[EvaluatedAnswer]] = {}
    for answer in answers:
        prompts.setdefault(answer.prompt_id, []).append(answer)
    groups = list(prompts.values())
    most = max((len(group) for group in groups), default=0)
    return Figures(
        answers=len(answers),
        reward_mean=statistics.fmean(answer.reward for answer in answers) if answers else None,
        interval=half_interval([[answer.reward for answer in group] for group in groups]),
        pass_at={k: value for k in powers(most) if (value := _pass_at(groups, correct_from, k)) is not None},
        majority=statistics.fmean(majority(group, correct_from) for group in groups)
        if most > 1 and any(answer.text is not None for answer in answers)
        else None,
    )


def by_subset(answers: Iterable[EvaluatedAnswer], correct_from: float) -> dict[str, Figures]:
    """Figures of each subset that answers name, in the order of their names."""
    found: dict[str, list[EvaluatedAnswer]] = {}
    for answer in answers:
        if answer.subset is not None:
            found.setdefault(answer.subset, []).append(answer)
    return {name: figures(found[name], correct_from) for name in sorted(found)}


def powers(most: int) -> list[int]:
    """1, 2, 4 and so on up to `most`, and `most` itself; none of less than two samples."""
    if most < 2:
        return []
    return sorted({*(1 << n for n in range(most.bit_length())), most})


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is correct, estimated without bias from `samples` of which some are.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: 1 - C(n - c, k) / C(n, k).
    """
    assert 0 < k <= samples, "k samples are drawn from those that there are"
    assert 0 <= correct <= samples
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(group: Sequence[EvaluatedAnswer], correct_from: float) -> float:
    """Whether the most frequent answer of a prompt is correct; the mean over equally frequent answers.

    Wang et al. 2022, "Self-Consistency". Samples with the same text count with the share that was scored as correct. A sample
    without an answer has no vote, and a prompt without any vote counts 0.
    """
    counts = Counter(answer.text for answer in group if answer.text)
    if not counts:
        return 0.0
    most = max(counts.values())
    shares = [
        statistics.fmean(answer.reward >= correct_from for answer in group if answer.text == text)
        for text, count in counts.items()
        if count == most
    ]
    return statistics.fmean(shares)


def half_interval(groups: Sequence[Sequence[float]]) -> float | None:
    """Half of the 95 % interval of the mean over all rewards, with standard errors clustered by prompt.

    Miller 2024, "Adding Error Bars to Evals", equation 4: samples of one prompt are not independent.
    """
    count = sum(len(group) for group in groups)
    if len(groups) < 2:
        return None
    mean = sum(sum(group) for group in groups) / count
    variance = sum(sum(reward - mean for reward in group) ** 2 for group in groups) / count**2
    return Z_95 * math.sqrt(variance * len(groups) / (len(groups) - 1))


def difference(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> tuple[float, float | None]:
    """Mean difference of the rewards of the same prompts, and half of its 95 % interval. Each holds rewards by prompt.

    Pairing by prompt removes the prompts' difficulty, so that smaller gains show than between two means. Miller 2024, equation
    7.
    """
    both = sorted(before.keys() & after.keys())
    assert both, "they answer the same prompts"
    gains = [[statistics.fmean(after[prompt]) - statistics.fmean(before[prompt])] for prompt in both]
    return statistics.fmean(gain for (gain,) in gains), half_interval(gains)


def _pass_at(groups: Sequence[Sequence[EvaluatedAnswer]], correct_from: float, k: int) -> float | None:
    """Mean pass@k over prompts with at least k answers; None if there are none."""
    values = [
        pass_at_k(len(group), sum(answer.reward >= correct_from for answer in group), k)
        for group in groups
        if len(group) >= k
    ]
    return statistics.fmean(values) if values else None


def evaluation_metrics(record: EvaluateRecord) -> dict[str, float]:
    """Metrics of an evaluation, by name."""
    metrics: dict[str, float] = {"eval/lag": record["lag"]} if "lag" in record else {}
    for path, part in _parts(record["sets"]):
        for figure, value in part.items():
            if isinstance(value, int | float):
                metrics[f"{path}/{figure}"] = value
        metrics |= {f"{path}/pass_at_{k}": value for k, value in part.get("pass_at", {}).items()}
    return metrics


def held_out_metrics(record: HeldOutRecord) -> dict[str, float]:
    """Metrics of held-out losses, by name."""
    metrics: dict[str, float] = {}
    for path, part in _parts(record["sets"]):
        for figure in ("loss", "perplexity", "tokens", "samples"):
            metrics[f"{path}/{figure}"] = part[figure]
    return metrics


def _parts(sets: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each set and each subset, by the prefix of their metrics' names."""
    for name, result in sets.items():
        yield f"eval/{name}", result
        for subset, part in result.get("subsets", {}).items():
            yield f"eval/{name}/{name_part(subset)}", part
