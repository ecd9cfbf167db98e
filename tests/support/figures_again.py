"""Every published figure of an iteration computed again from its files, by other code than the product's.

Reads Parquet and JSON alone: nothing of millrace is imported. FIGURES has a row for each metric, and ONLY_MEASURED the reason for
each that no file can give. A metric in neither has no row, which fails the test.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

FLOAT32 = {
    "rel_tol": 2e-4,
    "abs_tol": 2e-6,
}  # log-probabilities are stored in fp32, whose differences are small
Rows = list[dict[str, Any]]
SAME = 1e-9  # rewards that differ by less are equal
KINDS = (
    "unusable_row",
    "too_few_scored",
    "group_filter",
    "filter_failed",
    "zero_variance",
    "reward_band",
    "truncated",
    "too_long",
)


@dataclass
class Iteration:
    """The files of one committed iteration, as its manifest names them."""

    run: Path
    index: int
    done: int = field(init=False)  # iterations that the evaluated weights were trained for
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.done = self.index + 1
        self.config = json.loads((self.run / "run.json").read_text())["config"]

    @property
    def folder(self) -> Path:
        return self.run / "iterations" / f"{self.index:06d}"

    @cached_property
    def manifest(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return loaded

    @property
    def published(self) -> dict[str, float]:
        """The figures that the run published."""
        metrics: dict[str, float] = self.manifest["tasks"]["metrics"]
        return metrics

    @property
    def published_before(self) -> dict[str, float]:
        """The figures of the evaluation that it made of the weights that it began with."""
        metrics: dict[str, float] = self.manifest["tasks"].get("evaluated", {}).get("metrics", {})
        return metrics

    def rows(self, kind: str) -> Rows:
        """The rows of a table, or of all the parts of a kind."""
        names = [file["path"] for file in self.manifest["files"]]
        paths = [name for name in names if name == f"{kind}.parquet" or name.startswith(f"{kind}/")]
        return [row for path in sorted(paths) for row in pq.read_table(self.folder / path).to_pylist()]

    @cached_property
    def before(self) -> Iteration | None:
        return Iteration(self.run, self.index - 1) if self.index else None

    @cached_property
    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Of samples that the iteration generated, or had from the one before."""
        return {row["sample_id"]: row for row in self.rows("verdicts") if row.get("reused_from") is None}

    def ended(self, sample: str) -> bool:
        """Whether its group was kept or dropped here."""
        row = self.verdicts.get(sample)
        return row is None or row["verdict"] in ("kept", "dropped")

    @cached_property
    def parts(self) -> Rows:
        return self.rows("rollouts")

    @cached_property
    def rollouts(self) -> Rows:
        return [row for row in self.parts if self.ended(row["sample_id"])]

    @cached_property
    def rewards(self) -> Rows:
        return [row for row in self.rows("rewards") if self.ended(row["sample_id"])]

    @cached_property
    def turns(self) -> Rows:
        return self.rows("turns")

    @cached_property
    def batch(self) -> Rows:
        return self.rows("batch")

    @cached_property
    def deferred(self) -> dict[str, dict[str, Any]]:
        """Samples that the iteration deferred, as far as they were made."""
        return {row["sample_id"]: row for row in self.rows("deferred")}

    @cached_property
    def carried(self) -> dict[str, dict[str, Any]]:
        return self.before.deferred if self.before else {}

    @cached_property
    def steps(self) -> Rows:
        loaded: Rows = json.loads((self.folder / "step.json").read_text())["steps"]
        return loaded

    @property
    def version(self) -> int:
        """The weight version that it begins with."""
        return int(self.steps[0]["version"]) - 1

    @cached_property
    def supervised(self) -> bool:
        return bool(self.config["algorithm"]["loss"]["kind"] == "sft")

    @cached_property
    def made(self) -> Rows:
        """Every sample that was made here, or was under way: of the parts, and those deferred ones that no part has."""
        stored = {row["sample_id"] for row in self.parts}
        return [*self.parts, *(row for sample, row in self.deferred.items() if sample not in stored)]


def turned(row: dict[str, Any]) -> bool:
    """Whether a sample is of a rollout of several turns."""
    return row.get("samples") is not None


def size(row: dict[str, Any]) -> int:
    """Tokens of a sample that the policy generated."""
    return sum(row["loss_mask"]) if turned(row) else row["response_length"]


def mask(row: dict[str, Any]) -> list[int]:
    """Which tokens of a row of the batch have a loss."""
    left = row.get("trained_mask")
    return list(row["loss_mask"] if left is None else left)


def rollout_of(sample: str) -> str:
    return sample.split(".")[0]


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def quantile(values: list[int], share: float) -> float | None:
    """Linear between the two nearest."""
    if not values:
        return None
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# what was generated


def share_of(status: str) -> Callable[[Iteration], float]:
    return lambda it: sum(row["status"] == status for row in it.rollouts) / max(1, len(it.rollouts))


def lengths(it: Iteration) -> list[int]:
    return [row["response_length"] for row in it.rollouts]


def generated_turns(it: Iteration) -> Rows:
    """Turns, and segments of answers that no sample has: a sample that is whole has its segments' tokens."""
    whole = {row["sample_id"] for row in it.made}
    return [
        row
        for row in it.turns
        if row["kind"] == "segment" or (row["kind"] == "answer" and row["rollout_id"] not in whole)
    ]


def generated(it: Iteration) -> int:
    """Tokens that engines answered in this iteration."""
    turns = sum(len(row["output_ids"]) for row in generated_turns(it))
    rows = sum(row["response_length"] for row in it.made if not turned(row))
    ids = {row["sample_id"] for row in it.made if row["status"] != "failed"}
    before = sum(row["response_length"] for sample, row in it.carried.items() if sample in ids)
    return turns + rows - before


def oldest_ages(it: Iteration) -> float:
    spans = [[span["version"] for span in row["policy_versions"]] for row in it.rollouts]
    return mean([it.version - min(versions) for versions in spans if versions]) or 0.0


def tokens_per_second(it: Iteration) -> float:
    record = json.loads((it.folder / "results" / "rollout.json").read_text())
    result = record["result"] if isinstance(record["result"], dict) else json.loads(record["result"])
    seconds = result["seconds"] - result["engines_s"]
    return generated(it) / seconds if seconds else 0.0


def scored_tokens_per_second(it: Iteration) -> float:
    record = json.loads((it.folder / "results" / "reward.json").read_text())
    result = record["result"] if isinstance(record["result"], dict) else json.loads(record["result"])
    scored = {row["sample_id"] for row in it.rows("rewards")}
    tokens = sum(row["response_length"] for row in it.rows("rollouts") if row["sample_id"] in scored)
    return tokens / result["seconds"]


# what became of the tokens


def trained(it: Iteration) -> int:
    return sum(sum(mask(row)) for row in it.batch if row.get("reused_from") is None)


def masked(it: Iteration) -> int:
    fresh = [row for row in it.batch if row.get("reused_from") is None]
    return sum(size(row) for row in fresh) - trained(it)


def dropped_by(it: Iteration) -> Counter[str]:
    """Tokens by what dropped them. Turns that no sample took up are dropped too."""
    found: Counter[str] = Counter()
    for row in it.made:
        verdict = it.verdicts[row["sample_id"]]
        if verdict["verdict"] == "dropped":
            found[verdict["dropped_by"]] += size(row)
    in_turns = sum(len(row["output_ids"]) for row in it.turns if row["kind"] == "segment")
    in_samples = sum(size(row) for row in it.parts if turned(row))
    if in_turns > in_samples:
        found["superseded"] += in_turns - in_samples
    return found


def fate(verdict: str) -> Callable[[Iteration], int]:
    """Tokens of samples of which this became, and of answers under way that were ended with them."""

    def of(it: Iteration) -> int:
        samples = [row for row in it.made if it.verdicts[row["sample_id"]]["verdict"] == verdict]
        ended = [row for row in generated_turns(it) if row["kind"] == "answer"]
        mine = [row for row in ended if it.verdicts.get(row["rollout_id"], {}).get("verdict") == verdict]
        return sum(map(size, samples)) + sum(len(row["output_ids"]) for row in mine)

    return of


def carried(it: Iteration) -> int | None:
    return sum(map(size, it.carried.values())) if it.carried else None


def trained_again(it: Iteration) -> int | None:
    again = [row for row in it.batch if row.get("reused_from") is not None]
    return sum(sum(mask(row)) for row in again) if again else None


def length_quantile(kept: bool, share: float) -> Callable[[Iteration], float | None]:
    def of(it: Iteration) -> float | None:
        verdicts = [(row, it.verdicts[row["sample_id"]]["verdict"]) for row in it.made]
        return quantile(
            [size(row) for row, v in verdicts if v != "deferred" and (v == "kept") == kept], share
        )

    return of


# rollouts of several turns


def of_session(figure: Callable[[Rows, Rows, float], float]) -> Callable[[Iteration], float | None]:
    def of(it: Iteration) -> float | None:
        rows = [row for row in it.rollouts if turned(row)]
        calls = [row for row in it.turns if row["kind"] == "call"]
        count = len({rollout_of(row["sample_id"]) for row in rows})
        return figure(rows, calls, count) if rows else None

    return of


# rewards and groups


def rewards(it: Iteration) -> list[float]:
    return [row["reward"] for row in it.rewards if row["reward"] is not None]


def spread(values: list[float]) -> float | None:
    return statistics.pstdev(values) if values else None


def scored_groups(it: Iteration) -> list[list[float]]:
    """Mean rewards of the scored rollouts of each group."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in it.rewards:
        if row["reward"] is not None:
            found[row["group_id"]][rollout_of(row["sample_id"])].append(row["reward"])
    return [[statistics.fmean(values) for values in group.values()] for group in found.values()]


def equal(values: list[float]) -> bool:
    return max(values) - min(values) <= SAME


def passes(groups: list[list[float]], k: int, correct_from: float) -> float | None:
    """Mean chance over groups that one of k is correct: over all choices of k, without bias."""
    each = []
    for values in groups:
        wrong = sum(value < correct_from for value in values)
        chance = 1.0
        for drawn in range(k):
            chance *= max(0, wrong - drawn) / (len(values) - drawn)
        each.append(1 - chance)
    return mean(each)


def pass_at(it: Iteration, k: str) -> float | None:
    groups = scored_groups(it)
    return passes(groups, int(k), 1.0) if groups and min(map(len, groups)) >= int(k) else None


def several_sources(it: Iteration) -> dict[str, str]:
    """The source of each sample; empty where there is one."""
    found = {row["sample_id"]: row["source"] for row in it.rollouts}
    return found if len(set(found.values())) > 1 else {}


def source_mean(it: Iteration, source: str) -> float | None:
    of = several_sources(it)
    return mean(
        [r["reward"] for r in it.rewards if r["reward"] is not None and of.get(r["sample_id"]) == source]
    )


def part_mean(it: Iteration, name: str) -> float | None:
    source, _, part = name.rpartition("/")
    of = several_sources(it)
    return mean(
        [
            value
            for row in it.rewards
            if not source or of.get(row["sample_id"]) == source
            for named, value in (row["reward_parts"] or [])
            if named == part
        ]
    )


def failed_rewards(it: Iteration) -> float:
    return sum(row["scoring"] in ("failed", "timed_out") for row in it.rewards) / max(1, len(it.rewards))


# the filter


def judged_groups(it: Iteration) -> dict[str, Rows]:
    found: dict[str, Rows] = defaultdict(list)
    for row in it.verdicts.values():
        if row["verdict"] in ("kept", "dropped"):
            found[row["group_id"]].append(row)
    return found


def kept_groups(it: Iteration) -> list[str]:
    return [
        group for group, rows in judged_groups(it).items() if any(row["verdict"] == "kept" for row in rows)
    ]


def dropped_groups(it: Iteration) -> dict[str, str]:
    """Groups of which nothing is trained, and what dropped them."""
    kept = set(kept_groups(it))
    return {group: rows[0]["dropped_by"] for group, rows in judged_groups(it).items() if group not in kept}


def zero_variance(it: Iteration) -> float:
    groups = [values for values in scored_groups(it) if values]
    return sum(map(equal, groups)) / max(1, len(judged_groups(it)))


def surplus(it: Iteration) -> float:
    again = {row["group_id"] for row in it.batch if row.get("reused_from") is not None}
    return len(judged_groups(it)) / (it.config["rollout"]["prompts"] - len(again))


# a teacher, a curriculum, reuse


def teacher_seconds(it: Iteration) -> float | None:
    return mean([row["teacher_s"] for row in it.rewards if row.get("teacher_s") is not None])


def teacher_failed(it: Iteration) -> float | None:
    asked = [row for row in it.rewards if row.get("teacher_s") is not None]
    return sum(row["teacher_logprobs"] is None for row in asked) / len(asked) if asked else None


def level(it: Iteration, source: str) -> int | None:
    """The highest level reached: it rises once `groups` groups of it have a mean reward that is high enough."""
    levels = next((s["levels"] for s in it.config["data"]["sources"] if s["name"] == source), None)
    if levels is None:
        return None
    highest, rewards_there = levels["first"], []
    for index in range(it.index - it.config["pipeline"]["ahead"]):
        earlier = Iteration(it.run, index)
        of = {row["group_id"]: row.get("group_reward") for row in earlier.verdicts.values()}
        for group in sorted(earlier.rows("prompts"), key=lambda row: row["ordinal"]):
            reward = of.get(group["group_id"])
            if group["source"] != source or group["level"] != highest or reward is None:
                continue
            rewards_there.append(reward)
            if len(rewards_there) == levels["groups"]:
                high_enough = statistics.fmean(rewards_there) >= levels["raise_from"]
                highest = min(levels["last"], highest + high_enough)
                rewards_there = []
    return highest


def stage(it: Iteration) -> int | None:
    """By the stages' lengths in iterations: of a curriculum whose stages end by rewards there is no row."""
    stages = it.config["data"]["stages"]
    if not stages:
        return None
    left, now = it.index - it.config["pipeline"]["ahead"], 0
    while (
        now < len(stages) - 1 and stages[now]["iterations"] is not None and left >= stages[now]["iterations"]
    ):
        left, now = left - stages[now]["iterations"], now + 1
    return now


def reused(it: Iteration) -> dict[str, dict[str, Any]]:
    """A row of each group of the batch that was trained before."""
    return {row["group_id"]: row for row in it.batch if row.get("reused_from") is not None}


def with_buffer(figure: Callable[[Iteration], float]) -> Callable[[Iteration], float | None]:
    return lambda it: figure(it) if it.config["rollout"]["buffer"] else None


def reused_ages(it: Iteration) -> list[int]:
    """Weight versions since the iteration that generated each group began."""
    return [it.version - Iteration(it.run, row["reused_from"]).version for row in reused(it).values()]


def buffered(it: Iteration) -> int:
    """Groups trained before that are neither too old nor used up."""
    buffer, uses = it.config["rollout"]["buffer"], Counter[str]()
    born: dict[str, int] = {}
    for index in range(it.index):
        earlier = Iteration(it.run, index)
        for group in {row["group_id"] for row in earlier.batch}:
            uses[group] += 1
            born.setdefault(group, earlier.version)
    return sum(
        uses[group] < buffer["max_uses"] and it.version - version <= buffer["max_age"]
        for group, version in born.items()
    )


# the step


def by_step(it: Iteration) -> list[Rows]:
    """The rows that each step trains, its passes included."""
    steps = sorted({row["train_step"] for row in it.batch})
    return [[row for row in it.batch if row["train_step"] == step] for step in steps]


def over_steps(figure: Callable[[Iteration, Rows], float | None]) -> Callable[[Iteration], float | None]:
    """The mean of a figure over the steps that have it."""

    def of(it: Iteration) -> float | None:
        values = [figure(it, rows) for rows in by_step(it)]
        return mean([value for value in values if value is not None])

    return of


@dataclass(frozen=True)
class Token:
    """A trained token: the trainer's log-probability before the iteration, the engine's, its age and its advantage."""

    ours: float
    theirs: float
    age: int
    advantage: float | None


def tokens(it: Iteration, rows: Rows) -> list[Token]:
    """The tokens of rows that have a loss. Empty log-probabilities where the run stores none."""
    stored = {row["sample_id"]: row["trainer_logprobs"] for row in it.rows("logprobs")}
    return [
        Token(stored[row["sample_id"]][at], row["rollout_logprobs"][at], age, row["advantage"])
        for row in rows
        if row["sample_id"] in stored
        for at, (on, age) in enumerate(zip(mask(row), ages(it, row), strict=True))
        if on
    ]


def ages(it: Iteration, row: dict[str, Any]) -> list[int]:
    """Published versions between each token's weights and those that the iteration begins with."""
    versions: list[int] = []
    spans = row["policy_versions"]
    ends = [*(span["first_token"] for span in spans[1:]), row["response_length"]]
    for span, end in zip(spans, ends, strict=True):
        versions += [span["version"]] * (end - span["first_token"])
    found = [max(0, math.ceil((it.version - version) / len(it.steps))) for version in versions]
    if it.config["pipeline"]["ahead"] and it.config["pipeline"]["on_update"] == "keep":
        # the engine went on with keys and values of older weights: no version alone gives these tokens their probabilities
        old = list(itertools.accumulate((age > 0 for age in found), operator.or_))
        found = [max(age, int(older)) for age, older in zip(found, old, strict=True)]
    return found


def of_tokens(figure: Callable[[list[Token]], float | None]) -> Callable[[Iteration], float | None]:
    """Of trained tokens whose log-probabilities are stored."""
    return over_steps(lambda it, rows: figure(found) if (found := tokens(it, rows)) else None)


def at_age(
    figure: Callable[[Token], float], holds: Callable[[int], bool]
) -> Callable[[Iteration], float | None]:
    return of_tokens(lambda found: mean([figure(token) for token in found if holds(token.age)]))


def ratio(token: Token) -> float:
    return math.exp(min(20.0, max(-20.0, token.ours - token.theirs)))


def gap(token: Token) -> float:
    return abs(token.ours - token.theirs)


def k3(token: Token) -> float:
    """KL of the engine from the trainer, for a token that the engine drew."""
    difference = token.ours - token.theirs
    return math.expm1(difference) - difference


def on_age(name: str) -> Callable[[int], bool]:
    age = int(name)
    return (lambda found: found >= 4) if age == 4 else (lambda found: found == age)


def applied(it: Iteration) -> Callable[[Token], float] | None:
    """What multiplies a token's loss; None where that is no function of the token alone."""
    c = it.config["algorithm"]["correction"]
    of_samples = [c[name] for name in ("veto", "opsm_delta", "max_token_age")]
    if of_samples != [None] * len(of_samples) or c["level"] != "token":
        return None
    kinds: dict[str, Callable[[float, bool], float]] = {
        "truncate": lambda value, _: min(c["high"], max(c["low"], value)),
        "mask": lambda value, inside: value if inside else 0.0,
        "icepop": lambda value, inside: value if inside else 0.0,
        "reject": lambda _, inside: float(inside),
        "none": lambda *_: 1.0,
    }
    kind = kinds[c["kind"]]
    return lambda token: kind(ratio(token), c["low"] <= ratio(token) <= c["high"])


def of_applied(figure: Callable[[list[float]], float]) -> Callable[[Iteration], float | None]:
    def of(it: Iteration) -> float | None:
        factor = applied(it)
        return None if factor is None else of_tokens(lambda found: figure([factor(t) for t in found]))(it)

    return of


def ess(values: list[float]) -> float:
    return math.fsum(values) ** 2 / (len(values) * math.fsum(value**2 for value in values))


def importance(figure: Callable[[list[float]], float]) -> Callable[[Iteration], float | None]:
    return of_tokens(lambda found: figure([ratio(token) for token in found]))


def out_of_band(it: Iteration) -> float | None:
    c = it.config["algorithm"]["correction"]
    return of_tokens(lambda found: mean([float(not c["low"] <= ratio(t) <= c["high"]) for t in found]))(it)


def token_advantages(it: Iteration, rows: Rows) -> list[list[float]] | None:
    """Of the trained tokens of each row; with a teacher's part if its log-probabilities are stored. None where they are not known."""
    if any(row["advantage"] is None for row in rows):
        return None
    a = it.config["algorithm"]
    coef = a["distillation_coef"]
    server = a["teacher_server"]
    scaled = whitened(it)
    if not coef or (server is not None and server["top_k"]):  # likeliest tokens make a loss, no advantage
        return [[scaled(row["advantage"])] * sum(mask(row)) for row in rows]
    ours = {row["sample_id"]: row["trainer_logprobs"] for row in it.rows("logprobs")}
    teachers = {row["sample_id"]: row["teacher_logprobs"] for row in it.rows("rewards")}
    if any(found.get(row["sample_id"]) is None for found in (ours, teachers) for row in rows):
        return None
    return [
        [
            scaled(row["advantage"]) + coef * (teacher - policy)
            for teacher, policy, on in zip(
                teachers[row["sample_id"]], ours[row["sample_id"]], mask(row), strict=True
            )
            if on
        ]
        for row in rows
    ]


def whitened(it: Iteration) -> Callable[[float], float]:
    """What is made of a row's advantage: its place among those of all trained tokens of the iteration, where it is whitened."""
    if not it.config["algorithm"]["whiten"]:
        return lambda advantage: advantage
    held = [row["advantage"] for row in it.batch for _ in range(sum(mask(row)))]
    centre, scale = statistics.fmean(held), math.sqrt(statistics.variance(held) + 1e-8)
    return lambda advantage: (advantage - centre) / scale


def advantage_mean(it: Iteration, rows: Rows) -> float | None:
    found = token_advantages(it, rows)
    return None if found is None else mean([value for values in found for value in values])


def staleness_max(it: Iteration) -> float:
    return max(age for row in it.batch for on, age in zip(mask(row), ages(it, row), strict=True) if on)


def only_step(value: Callable[[Iteration], float | None]) -> Callable[[Iteration], float | None]:
    """Of an iteration of one step whose ratio is to the trainer's own weights. Log-probabilities of later weights are not stored."""
    return lambda it: (
        value(it) if len(it.steps) == 1 and it.config["algorithm"]["old_logprobs"] != "rollout" else None
    )


def policy_loss(it: Iteration) -> float | None:
    """Of GRPO at a ratio of 1: the mean over rollouts of the mean of -advantage over their tokens."""
    a = it.config["algorithm"]
    if (a["preset"], a["aggregation"], a["correction"]["kind"]) != ("grpo", "sequence_mean", "none"):
        return None
    if any(turned(row) for row in it.batch):
        return None
    found = token_advantages(it, it.batch)
    return None if found is None else mean([-(mean(values) or 0.0) for values in found])


def loss(it: Iteration) -> float | None:
    return policy_loss(it) if it.config["algorithm"]["kl_coef"] == 0 else None


def rate(it: Iteration) -> float | None:
    schedule = it.config["trainer"]["schedule"]
    constant = schedule["kind"] == "constant" and not schedule["warmup_steps"]
    return it.config["trainer"]["optimizer"]["lr"] if constant else None


# held-out sets


def evaluated(it: Iteration, name: str) -> tuple[Rows, dict[str, Any]]:
    """The stored answers of a set, or of one of its subsets, and the set's settings."""
    held, _, subset = name.partition("/")
    settings = next(item for item in it.config["evaluation"]["sets"] if item["name"] == held)
    rows = pq.read_table(it.run / "eval" / held / f"{it.done:06d}.parquet").to_pylist()
    return [row for row in rows if not subset or row["subset"] == subset], settings


def answers(rows: Rows) -> list[tuple[str, float, str | None]]:
    """Prompt, reward and answer of each sample; one that could not be scored counts 0, one that was not generated not at all."""
    counted = [row for row in rows if row["reward"] is not None or row["scoring"] in ("failed", "timed_out")]
    return [(row["prompt_id"], row["reward"] or 0.0, row["answer"]) for row in counted]


def by_prompt(rows: Rows) -> list[list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for prompt, reward, _ in answers(rows):
        found[prompt].append(reward)
    return list(found.values())


def of_set(
    figure: Callable[[Rows, dict[str, Any]], float | None],
) -> Callable[[Iteration, str], float | None]:
    return lambda it, name: figure(*evaluated(it, name))


def interval(rows: Rows, _: dict[str, Any]) -> float | None:
    """Half of the 95 % interval, errors clustered by prompt."""
    groups = by_prompt(rows)
    flat = [value for group in groups for value in group]
    middle = statistics.fmean(flat)
    square = math.fsum(math.fsum(value - middle for value in group) ** 2 for group in groups)
    return 1.959963984540054 * math.sqrt(square / len(flat) ** 2 * len(groups) / (len(groups) - 1))


def majority(rows: Rows, settings: dict[str, Any]) -> float:
    prompts: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for prompt, reward, answer in answers(rows):
        prompts[prompt].append((answer or "", reward >= settings["correct_from"]))
    found = []
    for given in prompts.values():
        votes = Counter(answer for answer, _ in given if answer)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        right = [statistics.fmean(ok for answer, ok in given if answer == winner) for winner in winners]
        found.append(statistics.fmean(right) if right else 0.0)
    return statistics.fmean(found)


def held_out_loss(rows: Rows, _: dict[str, Any]) -> float:
    return math.fsum(row["loss"] * row["loss_tokens"] for row in rows) / sum(
        row["loss_tokens"] for row in rows
    )


def set_pass_at(it: Iteration, name: str, k: str) -> float | None:
    rows, settings = evaluated(it, name)
    groups = [group for group in by_prompt(rows) if len(group) >= int(k)]
    return passes(groups, int(k), settings["correct_from"])


def count_where(holds: Callable[[dict[str, Any]], bool]) -> Callable[[Iteration, str], float | None]:
    return of_set(lambda rows, _: sum(map(holds, rows)))


FIGURES: dict[str, Callable[..., float | None]] = {
    r"rollout/samples": lambda it: len(it.rollouts),
    r"rollout/tokens": lambda it: sum(lengths(it)),
    r"rollout/tokens_per_second": tokens_per_second,
    r"rollout/(truncated|aborted|failed)_share": lambda it, status: share_of(status)(it),
    r"rollout/response_length_mean": lambda it: mean([*map(float, lengths(it))]),
    r"rollout/response_length_median": lambda it: quantile(lengths(it), 0.5),
    r"rollout/response_length_min": lambda it: min(lengths(it)),
    r"rollout/response_length_max": lambda it: max(lengths(it)),
    r"staleness/mean": oldest_ages,
    r"tokens/generated": generated,
    r"tokens/trained": trained,
    r"tokens/masked": masked,
    r"tokens/dropped": lambda it: sum(dropped_by(it).values()),
    r"tokens/dropped_(\w+)": lambda it, cause: dropped_by(it)[cause],
    r"tokens/(deferred|returned)": lambda it, verdict: fate(verdict)(it),
    r"tokens/carried": carried,
    r"tokens/trained_share": lambda it: trained(it) / generated(it),
    r"tokens/trained_again": trained_again,
    r"tokens/trained_length_p(\d+)": lambda it, p: length_quantile(True, int(p) / 100)(it),
    r"tokens/untrained_length_p(\d+)": lambda it, p: length_quantile(False, int(p) / 100)(it),
    r"session/turns_mean": of_session(lambda rows, _, count: sum(row["turns"] for row in rows) / count),
    r"session/branches_mean": of_session(lambda rows, _, count: len(rows) / count),
    r"session/calls_mean": of_session(lambda _, calls, count: len(calls) / count),
    r"session/failed_calls_share": of_session(
        lambda _, calls, count: sum(call["failed"] for call in calls) / max(1, len(calls))
    ),
    r"reward/mean": lambda it: mean(rewards(it)),
    r"reward/std": lambda it: spread(rewards(it)),
    r"reward/max": lambda it: max(rewards(it)),
    r"reward/tokens_per_second": scored_tokens_per_second,
    r"reward/failed_share": failed_rewards,
    r"reward/pass@(\d+)": pass_at,
    r"reward/group_std_mean": lambda it: mean([statistics.stdev(g) for g in scored_groups(it) if len(g) > 1]),
    r"reward/zero_variance_share": lambda it: mean([float(equal(group)) for group in scored_groups(it)]),
    r"reward/([^/]+)/mean": source_mean,
    r"reward_part/(.+)": part_mean,
    r"filter/groups_generated": lambda it: len(judged_groups(it)),
    r"filter/groups_kept": lambda it: len(kept_groups(it)),
    r"filter/groups_dropped": lambda it: len(dropped_groups(it)),
    rf"filter/dropped_({'|'.join(KINDS)})": lambda it, kind: [*dropped_groups(it).values()].count(kind),
    r"filter/zero_variance_share": zero_variance,
    r"filter/surplus_factor": surplus,
    r"teacher/seconds_mean": teacher_seconds,
    r"teacher/failed_share": teacher_failed,
    r"curriculum/([^/]+)/level": level,
    r"curriculum/stage": stage,
    r"reuse/groups": with_buffer(lambda it: len(reused(it))),
    r"reuse/share": with_buffer(lambda it: len(reused(it)) / it.config["rollout"]["prompts"]),
    r"reuse/buffered_groups": with_buffer(buffered),
    r"reuse/age_mean": with_buffer(lambda it: mean([*map(float, reused_ages(it))]) or 0.0),
    r"reuse/age_max": with_buffer(lambda it: max(reused_ages(it), default=0)),
    r"reuse/uses_mean": with_buffer(
        lambda it: mean([float(row["uses"]) for row in reused(it).values()]) or 0.0
    ),
    r"train/samples": over_steps(lambda it, rows: len(rows)),
    r"train/tokens": over_steps(lambda it, rows: sum(len(row["tokens"]) for row in rows)),
    r"train/version": lambda it: it.version + len(it.steps),
    r"train/lr": rate,
    r"train/staleness_mean": over_steps(
        lambda it, rows: mean(
            [float(age) for row in rows for on, age in zip(mask(row), ages(it, row), strict=True) if on]
        )
    ),
    r"train/staleness_max": staleness_max,
    r"train/logprob_gap_share": over_steps(
        lambda it, rows: mean(
            [float(not age) for row in rows for on, age in zip(mask(row), ages(it, row), strict=True) if on]
        )
    ),
    r"train/logprob_gap_mean": at_age(gap, lambda age: age == 0),
    r"train/logprob_gap_max": lambda it: max(
        (gap(t) for t in tokens(it, it.batch) if t.age == 0), default=None
    ),
    r"train/importance_mean": importance(statistics.fmean),
    r"train/importance_second": importance(lambda values: statistics.fmean(value**2 for value in values)),
    r"train/importance_std": importance(statistics.pstdev),
    r"train/importance_ess": importance(ess),
    r"train/importance_out_of_band": out_of_band,
    r"train/sampler_k1": of_tokens(lambda found: mean([token.theirs - token.ours for token in found])),
    r"train/sampler_k3": of_tokens(lambda found: mean([*map(k3, found)])),
    r"train/sampler_gap": of_tokens(lambda found: mean([*map(gap, found)])),
    r"train/correction_mean": of_applied(statistics.fmean),
    r"train/ess": of_applied(ess),
    r"train/left_out_share": of_applied(lambda values: values.count(0.0) / len(values)),
    r"train/mismatch_ratio": at_age(ratio, lambda age: age == 0),
    r"train/mismatch_kl": at_age(k3, lambda age: age == 0),
    r"train/staleness_ratio": at_age(ratio, lambda age: age > 0),
    r"train/behaviour_kl": at_age(k3, lambda age: age > 0),
    r"train/share_age_(\d)": lambda it, k: of_tokens(
        lambda found: mean([float(on_age(k)(token.age)) for token in found])
    )(it),
    r"train/logprob_gap_age_(\d)": lambda it, k: at_age(gap, on_age(k))(it),
    r"train/advantage_mean": over_steps(advantage_mean),
    r"train/pg_loss": only_step(policy_loss),
    r"train/loss": only_step(loss),
    r"train/ratio_mean": only_step(lambda it: 1.0),
    r"train/ratio_distance": only_step(lambda it: 0.0),
    r"train/approx_kl": only_step(lambda it: 0.0),
    r"train/clip_share(?:_low|_high)?": only_step(lambda it: 0.0),
    r"train/kl_coef": lambda it: (
        None if it.config["algorithm"]["kl_target"] else it.config["algorithm"]["kl_coef"]
    ),
    r"eval/(.+)/reward_mean": of_set(lambda rows, _: mean([reward for _, reward, _ in answers(rows)])),
    r"eval/(.+)/interval": of_set(interval),
    r"eval/(.+)/samples": of_set(
        lambda rows, _: len(answers(rows)) if not rows[0]["loss_tokens"] else len(rows)
    ),
    r"eval/(.+)/failed": count_where(lambda row: row["status"] == "failed"),
    r"eval/(.+)/unscored": count_where(lambda row: row["scoring"] in ("failed", "timed_out")),
    r"eval/(.+)/not_scored": count_where(lambda row: row["reward"] is None),
    r"eval/(.+)/response_length_mean": of_set(
        lambda rows, _: mean([float(r["response_length"]) for r in rows])
    ),
    r"eval/(.+)/truncated_share": of_set(
        lambda rows, _: mean([float(r["status"] == "truncated") for r in rows])
    ),
    r"eval/(.+)/pass_at_(\d+)": set_pass_at,
    r"eval/(.+)/majority": of_set(majority),
    r"eval/(.+)/loss": of_set(held_out_loss),
    r"eval/(.+)/perplexity": of_set(lambda rows, settings: math.exp(held_out_loss(rows, settings))),
    r"eval/(.+)/tokens": of_set(lambda rows, _: sum(row["loss_tokens"] for row in rows)),
}
"""How each figure follows from the files; None where the files of this run do not hold what it is of."""

ONLY_MEASURED = {
    r"time/.+": "a clock's, which no table holds",
    r"train/(scoring_)?tokens_per_second": "by the clock of the trainer's ranks",
    r"train/mfu": "by the same clock",
    r"train/scored_tokens": "no file says which passes a step makes",
    r"rollout/(kv_used|queue)_max": "what engines said of themselves",
    r"rollout/in_flight_limit": "it follows from what engines said of their caches",
    r"gpu/busy_share": "of the GPUs' own counters",
    r"train/(critic_)?grad_norm": "no file holds gradients",
    r"train/entropy": "no file holds the distribution, only the sampled tokens' log-probabilities",
    r"train/logprob_gap_(floor|limit)": "from a second computation of the trainer, one type wider",
    r"train/kl": "no file holds the reference's log-probabilities",
    r"train/teacher_kl": "no file holds the policy's log-probabilities of the teacher's tokens",
    r"train/(value_\w+|return_mean|critic_lr)": "no file holds the critic's values",
    r"train/(moe_\w+_loss|routing_agreement|expert_imbalance|expert_wait)": "no file holds what the routers gave",
    r"train/too_old_share": "no run of the test leaves tokens out by their age",
    r"train/of_the_users": "it is of a loss that a user wrote",
    r"sync/prompt_gap": "of texts that the engines score at the sync",
    r"eval/lag": "of the moment at which the evaluation ended",
}
"""Figures that the files cannot give, and why."""


def without_row(name: str) -> bool:
    """Whether a metric has neither a computation nor a reason."""
    return not any(re.fullmatch(pattern, name) for pattern in (*FIGURES, *ONLY_MEASURED))


def differing(run: Path) -> tuple[list[str], set[str]]:
    """Figures of a run that are not what the files say, and the names of those that were compared."""
    wrong, names = [], set()
    for manifest in sorted(run.glob("iterations/*/manifest.json")):
        iteration = Iteration(run, int(manifest.parent.name))
        unknown = [name for name in (*iteration.published, *iteration.published_before) if without_row(name)]
        assert not unknown, f"{unknown} have no row in tests/support/figures_again.py"
        for name, published, value in computed(iteration):
            names.add(name)
            if not math.isclose(published, value, **FLOAT32):
                wrong.append(
                    f"{iteration.index}: {name} is published as {published}, and the files say {value}"
                )
    return wrong, names


def computed(it: Iteration) -> Iterator[tuple[str, float, float]]:
    """Each published figure that the files hold: its name, what was published, and what they say."""
    yield from figures_of(it, it.published)
    earlier = Iteration(it.run, it.index)
    earlier.done = it.index
    yield from figures_of(earlier, it.published_before)


def figures_of(it: Iteration, figures: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """The same of figures that are given: of an evaluation, those of the weights of `it.done` iterations."""
    for name, published in figures.items():
        pattern, found = next(
            (pattern, match) for pattern in FIGURES | ONLY_MEASURED if (match := re.fullmatch(pattern, name))
        )
        value = FIGURES[pattern](it, *found.groups()) if pattern in FIGURES else None
        if value is not None:
            yield name, published, value
