"""Whether the stored tables of an iteration are consistent: drawn, generated, scored, judged, trained. Pure: rows in, problems out."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from millrace.core.contracts.ids import branch_id, iteration_number
from millrace.core.contracts.sample import PolicySpan, Verdict
from millrace.core.contracts.task_records import StepMetrics
from millrace.core.contracts.turns import TurnKind, place_of_columns, rows_that_count

NOTHING_GENERATED = "nothing_generated"  # a verdict's `dropped_by`


class Drawn(TypedDict):
    """Columns of prompts.parquet."""

    group_id: str


class Generated(TypedDict):
    """Columns of the rollout parts."""

    sample_id: str
    tokens: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float]


class StoredTurn(TypedDict):
    """Columns of the parts in turns/."""

    rollout_id: str
    order: int
    branch: int
    event: int
    kind: TurnKind
    output_ids: list[int]


class RewardRow(TypedDict):
    """Columns of the reward parts."""

    sample_id: str
    reward: float | None


class Judged(TypedDict):
    """Columns of verdicts.parquet."""

    sample_id: str
    group_id: str
    verdict: Verdict
    train_step: int | None
    reused_from: int | None
    dropped_by: str | None


class Origin(Generated):
    """Columns of the batch.parquet of an earlier iteration, of which samples are reused."""

    reward: float | None


class Trained(Origin):
    """Columns of batch.parquet."""

    train_step: int
    reused_from: int | None
    policy_versions: list[PolicySpan]


@dataclass(frozen=True)
class StoredIteration:
    """The tables of a committed iteration, as rows; `rollouts` and `rewards` are empty for a supervised one."""

    index: int
    prompts: Sequence[Drawn]
    rollouts: Sequence[Generated]
    rewards: Sequence[RewardRow]
    verdicts: Sequence[Judged]
    batch: Sequence[Trained]
    steps: Sequence[StepMetrics]
    turns: Sequence[StoredTurn] = ()
    origins: Sequence[Origin] = ()  # batch rows of the iterations that generated the groups reused here


def inconsistencies(stored: StoredIteration, versions: range, passes: int = 1) -> list[str]:
    """Inconsistencies. `versions`: the weight versions that the iteration's steps make, in `passes` passes over its batch."""
    return [
        f"iteration {iteration_number(stored.index)}: {problem}"
        for problem in (
            *_once(stored),
            *_batch(stored),
            *_generated(stored, versions.start - 1),
            *_left_out(stored),
            *_reused(stored),
            *_steps(stored, versions, passes),
            *_turns(stored),
        )
    ]


def _once(stored: StoredIteration) -> Iterable[str]:
    """Nothing is stored twice."""
    tables: list[tuple[str, Sequence[Mapping[str, Any]], str]] = [
        ("prompts", stored.prompts, "group_id"),
        ("rollouts", stored.rollouts, "sample_id"),
        ("rewards", stored.rewards, "sample_id"),
        ("verdicts", stored.verdicts, "sample_id"),
        ("batch", stored.batch, "sample_id"),
    ]
    for name, rows, key in tables:
        for value, count in Counter(row[key] for row in rows).items():
            if count > 1:
                yield f"{key} {value} is {count} times in {name}"


def _batch(stored: StoredIteration) -> Iterable[str]:
    """The batch is exactly what the verdicts kept, each sample in the step that its verdict names."""
    kept = {row["sample_id"]: row["train_step"] for row in stored.verdicts if row["verdict"] == "kept"}
    batch = {row["sample_id"]: row["train_step"] for row in stored.batch}
    for sample in sorted(kept.keys() ^ batch.keys()):
        yield f"sample {sample} is {'kept but not in the batch' if sample in kept else 'in the batch but not kept'}"
    for sample in sorted(kept.keys() & batch.keys()):
        if kept[sample] != batch[sample]:
            yield f"sample {sample}: its verdict names step {kept[sample]}, the batch step {batch[sample]}"
    drawn = {row["group_id"] for row in stored.prompts}
    judged = {row["group_id"] for row in stored.verdicts if row["reused_from"] is None}
    for group in sorted(drawn - judged):
        yield f"group {group} was drawn and has no verdict"
    for group in sorted(judged - drawn):
        yield f"group {group} has a verdict and was never drawn"


def _generated(stored: StoredIteration, version: int) -> Iterable[str]:
    """Every trained sample that is not reused was generated and scored, by the policy before the iteration's first step."""
    if not stored.rollouts:
        return
    rollouts = {row["sample_id"]: row for row in stored.rollouts}
    rewards = {row["sample_id"]: row for row in stored.rewards}
    for row in stored.batch:
        sample = row["sample_id"]
        if row["reused_from"] is not None:
            continue
        generated, scored = rollouts.get(sample), rewards.get(sample)
        if generated is None or scored is None:
            yield f"sample {sample} is trained and has no {'rollout' if generated is None else 'reward'}"
            continue
        if generated["tokens"] != row["tokens"] or generated["rollout_logprobs"] != row["rollout_logprobs"]:
            yield f"sample {sample} is trained on other tokens or log-probabilities than were generated"
        if scored["reward"] != row["reward"]:
            yield f"sample {sample} is trained with reward {row['reward']}, it was scored {scored['reward']}"
        newest = max((span["version"] for span in row["policy_versions"]), default=version)
        if newest > version:
            yield f"sample {sample} was generated by version {newest}, after the iteration's {version}"


def _left_out(stored: StoredIteration) -> Iterable[str]:
    """Every scored sample was generated, and samples dropped for lack of tokens have none."""
    rollouts = {row["sample_id"]: row for row in stored.rollouts}
    for row in stored.rewards:
        if row["reward"] is not None and row["sample_id"] not in rollouts:
            yield f"sample {row['sample_id']} is scored and has no rollout"
    for judged in stored.verdicts:
        made = rollouts.get(judged["sample_id"])
        if judged["dropped_by"] == NOTHING_GENERATED and made and any(made["loss_mask"]):
            yield f"sample {judged['sample_id']} was dropped as one that generated nothing, and its rollout has tokens"


def _reused(stored: StoredIteration) -> Iterable[str]:
    """Every reused sample equals the one trained by the iteration that generated it, and its verdict names that iteration."""
    origins = {row["sample_id"]: row for row in stored.origins}
    named = {row["sample_id"]: row["reused_from"] for row in stored.verdicts}
    for row in stored.batch:
        sample, earlier = row["sample_id"], row["reused_from"]
        if named.get(sample, earlier) != earlier:
            yield f"sample {sample}: its verdict and the batch name different iterations that generated it"
        if earlier is None:
            continue
        origin = origins.get(sample)
        if origin is None:
            yield f"sample {sample} is reused, and iteration {iteration_number(earlier)} did not train it"
        elif any(origin[name] != row[name] for name in ("tokens", "loss_mask", "rollout_logprobs", "reward")):
            yield (
                f"sample {sample} is reused with other tokens, log-probabilities or reward than iteration "
                f"{iteration_number(earlier)} trained it with"
            )


def _turns(stored: StoredIteration) -> Iterable[str]:
    """Every trained token of a rollout of several turns was generated in its turns."""
    rollouts: dict[str, list[StoredTurn]] = {}
    for row in stored.turns:
        rollouts.setdefault(row["rollout_id"], []).append(row)
    said: dict[str, dict[int, list[int]]] = {}  # by sample and event
    for rollout, rows in rollouts.items():
        for row in rows_that_count(rows, place_of_columns):
            if row["kind"] == "segment":
                events = said.setdefault(branch_id(rollout, row["branch"]), {})
                events.setdefault(row["event"], []).extend(row["output_ids"])
    in_turns = any(
        row["kind"] != "answer"
        for row in stored.turns
        # other rows are segments of unfinished single answers
    )
    for sample in stored.batch if in_turns else ():
        if sample["reused_from"] is not None:
            continue
        response = sample["tokens"][len(sample["tokens"]) - len(sample["loss_mask"]) :]
        trained = [token for token, mask in zip(response, sample["loss_mask"], strict=True) if mask]
        events = said.get(sample["sample_id"], {})
        if trained != [token for event in sorted(events) for token in events[event]]:
            yield f"sample {sample['sample_id']} is trained on other tokens than its turns generated"


def _steps(stored: StoredIteration, versions: range, passes: int) -> Iterable[str]:
    """Each step was trained once, on the samples that name it, or that name the same step of the first pass."""
    first = versions[: len(versions) // passes]
    made = [row["version"] for row in stored.steps]
    if made != list(versions):
        yield f"step.json names steps {made}, {list(versions)} were due"
    named = Counter(row["train_step"] for row in stored.batch)
    if sorted(named) != list(first):
        yield f"the batch names steps {sorted(named)}, {list(first)} were due"
    for row in stored.steps:
        due = named.get(first[(row["version"] - first[0]) % len(first)], 0)
        if row["samples"] != due:
            yield f"step {row['version']} trained {row['samples']} samples, the batch names {due}"
