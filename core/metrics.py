"""Statistics of an iteration's samples, for tracking. Pure: Arrow tables in, metrics by name out."""

from math import comb

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.core.accounts.staleness import oldest_versions
from millrace.core.contracts.ids import rollout_of
from millrace.core.contracts.task_records import CurriculumRecord, SamplePromptsRecord
from millrace.core.hooks.group_filters import zero_variance
from millrace.core.metric_names import name_part

MOST_PARTS = 200  # at most so many parts become metrics


def settled(samples: pa.Table, verdicts: pa.Table) -> pa.Table:
    """The samples of groups that the iteration kept or dropped. Deferred samples count where their group ends."""
    cut = verdicts.filter(pc.is_in(verdicts.column("verdict"), pa.array(["deferred", "returned"])))
    return samples.filter(pc.invert(pc.is_in(samples.column("sample_id"), cut.column("sample_id"))))


def sample_metrics(rollouts: pa.Table, rewards: pa.Table) -> dict[str, float]:
    """Lengths, outcomes and rewards over the samples of settled groups. Rewards are over scored samples only."""
    lengths = rollouts.column("response_length").to_numpy()
    status = rollouts.column("status").to_pylist()
    scoring = rewards.column("scoring").to_pylist()
    scored = np.array([value for value in rewards.column("reward").to_pylist() if value is not None])
    count = max(1, len(status))
    metrics = {
        "rollout/samples": float(len(status)),
        "rollout/tokens": float(lengths.sum()),
        "rollout/truncated_share": status.count("truncated") / count,
        "rollout/aborted_share": status.count("aborted") / count,
        "rollout/failed_share": status.count("failed") / count,
        "reward/failed_share": (scoring.count("failed") + scoring.count("timed_out")) / max(1, len(scoring)),
    }
    if len(lengths):
        metrics |= {
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_median": float(np.median(lengths)),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/response_length_min": float(lengths.min()),
        }
    if len(scored):
        metrics |= {
            "reward/mean": float(scored.mean()),
            "reward/std": float(scored.std()),
            "reward/max": float(scored.max()),
        }
    return metrics | _by_source(rollouts, rewards) | _of_parts(rollouts, rewards)


def scoring_metrics(rollouts: pa.Table, rewards: pa.Table, seconds: float) -> dict[str, float]:
    """Response tokens a second of scoring; empty if it took no time. seconds: in which any sample was scored."""
    if not seconds:
        return {}
    scored = rollouts.filter(pc.is_in(rollouts.column("sample_id"), rewards.column("sample_id")))
    return {
        "reward/tokens_per_second": float(pc.sum(scored.column("response_length")).as_py() or 0) / seconds
    }


def group_metrics(rewards: pa.Table) -> dict[str, float]:
    """pass@k over groups, for k = 1, 2, 4, ... (a sample passes at a reward of at least 1), and the spread within groups.

    Only scored samples count; the samples of a rollout count by their mean. reward/zero_variance_share: groups whose rewards
    are all equal; reward/group_std_mean:
    mean over groups of their Bessel-corrected standard deviation, over groups with two scored samples or more.
    """
    rollouts: dict[tuple[str, str], list[float]] = {}
    for group, sample, value in zip(
        *(rewards.column(name).to_pylist() for name in ("group_id", "sample_id", "reward")), strict=True
    ):
        if value is not None:
            rollouts.setdefault((group, rollout_of(sample)), []).append(value)
    groups: dict[str, list[float]] = {}
    for (group, _), values in rollouts.items():
        groups.setdefault(group, []).append(sum(values) / len(values))
    if not groups:
        return {}
    smallest = min(len(values) for values in groups.values())
    stds = [float(np.std(values, ddof=1)) for values in groups.values() if len(values) > 1]
    equal = [zero_variance(values) for values in groups.values()]
    metrics: dict[str, float] = {"reward/zero_variance_share": sum(equal) / len(equal)}
    if stds:
        metrics["reward/group_std_mean"] = sum(stds) / len(stds)
    k = 1
    while k <= smallest:
        each = [pass_at_k(len(values), sum(value >= 1 for value in values), k) for values in groups.values()]
        metrics[f"reward/pass@{k}"] = sum(each) / len(each)
        k *= 2
    return metrics


def teacher_metrics(rewards: pa.Table) -> dict[str, float]:
    """Seconds that a served teacher took for a sample, including its wait, and the share of samples without an answer."""
    asked = [seconds for seconds in rewards.column("teacher_s").to_pylist() if seconds is not None]
    if not asked:
        return {}
    answered = len(rewards) - rewards.column("teacher_logprobs").null_count
    return {
        "teacher/seconds_mean": sum(asked) / len(asked),
        "teacher/failed_share": 1 - answered / len(asked),
    }


def reuse_metrics(record: SamplePromptsRecord, prompts: int) -> dict[str, float]:
    """What the iteration reuses of the buffer; nothing without one. prompts: groups of the batch."""
    if "reused" not in record:
        return {}
    ages = [group["age"] for group in record["reused"]]
    uses = [group["uses"] for group in record["reused"]]
    return {
        "reuse/buffered_groups": float(record.get("buffered", 0)),
        "reuse/groups": float(len(ages)),
        "reuse/share": len(ages) / prompts,
        "reuse/age_mean": sum(ages) / len(ages) if ages else 0.0,
        "reuse/age_max": float(max(ages, default=0)),
        "reuse/uses_mean": sum(uses) / len(uses) if uses else 0.0,
    }


def curriculum_metrics(record: CurriculumRecord) -> dict[str, float]:
    """The highest level drawn from of each source with levels, and the stage; nothing without any."""
    metrics = {
        f"curriculum/{name_part(source)}/level": float(level)
        for source, level in record.get("levels", {}).items()
    }
    if "stage" in record:
        metrics["curriculum/stage"] = float(record["stage"])
    return metrics


def session_metrics(rollouts: pa.Table, turns: pa.Table) -> dict[str, float]:
    """Turns, branches and calls of rollouts of several turns; nothing without such rollouts."""
    samples = [row for row in rollouts.select(["samples", "turns"]).to_pylist() if row["samples"]]
    if not samples:
        return {}
    made = sum(1 / row["samples"] for row in samples)
    calls = [row["failed"] for row in turns.select(["kind", "failed"]).to_pylist() if row["kind"] == "call"]
    return {
        "session/turns_mean": sum(row["turns"] for row in samples) / made,
        "session/branches_mean": len(samples) / made,
        "session/calls_mean": len(calls) / made,
        "session/failed_calls_share": sum(calls) / len(calls) if calls else 0.0,
    }


def staleness_metrics(rollouts: pa.Table, version: int) -> dict[str, float]:
    """Versions between the oldest token of each sample and the trainer's weights `version`: mean and maximum."""
    spans = rollouts.column("policy_versions")
    covered = rollouts.filter(pc.greater(pc.list_value_length(spans), 0)).column("policy_versions")
    ages = version - oldest_versions(covered, version)
    if not len(ages):
        return {}
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is correct, from `correct` of n (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    assert 0 <= correct <= n
    assert 1 <= k <= n
    return 1.0 - comb(n - correct, k) / comb(n, k)


def _by_source(rollouts: pa.Table, rewards: pa.Table) -> dict[str, float]:
    sources = rollouts.column("source").to_pylist()
    if len(set(sources)) < 2:
        return {}
    source_of = dict(zip(rollouts.column("sample_id").to_pylist(), sources, strict=True))
    values: dict[str, list[float]] = {}
    for sample, value in zip(
        rewards.column("sample_id").to_pylist(), rewards.column("reward").to_pylist(), strict=True
    ):
        if value is not None:
            values.setdefault(source_of[sample], []).append(value)
    return {f"reward/{name_part(source)}/mean": sum(each) / len(each) for source, each in values.items()}


def _of_parts(rollouts: pa.Table, rewards: pa.Table) -> dict[str, float]:
    """Means of the parts of rewards, over the samples that have them; with several sources, of each source too."""
    source_of = dict(
        zip(rollouts.column("sample_id").to_pylist(), rollouts.column("source").to_pylist(), strict=True)
    )
    several = len(set(source_of.values())) > 1
    values: dict[str, list[float]] = {}
    for sample, parts in zip(
        rewards.column("sample_id").to_pylist(), rewards.column("reward_parts").to_pylist(), strict=True
    ):
        for part, value in parts:
            name = name_part(part)
            values.setdefault(f"reward_part/{name}", []).append(value)
            if several:
                values.setdefault(f"reward_part/{name_part(source_of[sample])}/{name}", []).append(value)
    # with this many parts, names come from samples, not from kinds
    if len(values) > MOST_PARTS:
        return {}
    return {name: sum(each) / len(each) for name, each in values.items()}
