"""Forms of the run that is killed: what its configuration has beside one answer a sample, and where a run of the form is killed.

A form without a place to be killed at has no points, and test_points.py fails. Owns each form's settings, the user's module
with its rows, and how a run shows that its form was at work. The rollouts of several turns are in rollouts.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow.parquet as pq

from millrace.core.contracts.images import image_names
from tests.soak import rollouts
from tests.support import seen_rows
from tests.support.growing_rows import growing_rows

VICTIMS = ("driver", "trainer", "engine", "ray", "prefect", "terminal", "scorer")
TAILED, LONGEST = "tailed.jsonl", 96  # sums with answers of very different lengths, and the longest of them
FLUSH = 16  # tokens of an answer that a kill may have generated again
TURNS = (
    "turns"  # a place within the task rollout: the first part of turns, or of answers under way, is written
)
REWARD_SERVER = (
    "SOAK_REWARD_SERVER"  # the URL of the server that remote rewards ask, which fails for some samples
)
LONG_ANSWERS_LATE = """
import time

from millrace.core.rewards.text import contains


def contains_late(sample):
    time.sleep(0.01 * sample.response_length)
    return contains(sample)
"""
MODULES = {
    "soak_rewards.py": LONG_ANSWERS_LATE,
    "soak_rollouts.py": rollouts.MODULE,
    "soak_rows.py": growing_rows(every=10),
    seen_rows.NAME: seen_rows.MODULE,
}  # of the user, beside the configuration; tailed_rows are too


@dataclass(frozen=True)
class Form:
    """One form. Every victim, the driver too, dies once in the task `all_die_in`, beside the driver's own places.

    So do the victims that runs of other forms do not have: `own_victims`.
    """

    settings: Mapping[str, Any]  # by field of the configuration
    driver_dies: tuple[tuple[str, str], ...]  # at these tasks; before them, in or after them
    all_die_in: str
    at_work: Callable[[Path], bool]  # whether a finished run shows what the form is for
    own_victims: tuple[str, ...] = ()
    own_die_in: tuple[str, ...] = ()  # the first of them also in these tasks
    asks_server: bool = False  # whether its reward asks REWARD_SERVER
    repeats: bool = (
        True  # whether a run of it is equal to another, bit for bit; else it is equal to its own replay
    )
    two_nodes: bool = False  # whether it runs on a cluster of two nodes, which does not die with a run


def victims(form: str) -> tuple[str, ...]:
    """Who dies in runs of the form. The head of a cluster that its user started is its user's to start again."""
    made = FORMS[form]
    usual = (victim for victim in VICTIMS if victim != "ray" or not made.two_nodes)
    return (*usual, *made.own_victims)


def overrides(form: str) -> list[str]:
    """What the command line adds to run.yaml."""
    return [f"{field}={json.dumps(value)}" for field, value in FORMS[form].settings.items()]


TAILED_ANSWERS = {
    "data.sources": [{"name": "sums", "path": TAILED, "sampling_key": "sampling"}],
    "rollout.sampling.max_new_tokens": LONGEST,
    "rollout.part_groups": 1,
}


def _several_turns(session: Mapping[str, Any]) -> Form:
    return Form(
        settings={
            "rollout.session": {**session, "max_tokens": 64, "max_turns": 4},
            "rollout.sampling.max_new_tokens": 8,
        },
        driver_dies=((TURNS, "in"),),
        all_die_in="rollout",
        at_work=lambda run: bool(_rows(run, "turns/part-*")),
    )


def _rows(run: Path, files: str) -> list[dict[str, Any]]:
    """The rows of all iterations' tables of a name."""
    paths = sorted(run.glob(f"iterations/*/{files}.parquet"))
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def _pipeline(
    driver_dies: tuple[tuple[str, str], ...],
    *,
    repeats: bool = False,
    all_die_in: str = "rollout",
    own_victims: tuple[str, ...] = (),
    shards: Mapping[str, Any] = MappingProxyType({}),
    at_work: Callable[[Path], bool] = lambda run: _oldest(run) > 0,
    evaluation: Mapping[str, Any] = MappingProxyType({}),
    trainer: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> Form:
    return Form(
        settings={
            **TAILED_ANSWERS,
            "algorithm.correction.kind": "truncate",
            **{f"pipeline.{name}": value for name, value in settings.items()},
            **evaluation,
            **trainer,
            **shards,
        },
        driver_dies=driver_dies,
        all_die_in=all_die_in,
        at_work=at_work,
        own_victims=own_victims,
        repeats=repeats,
    )


def _oldest(run: Path) -> int:
    """The largest age of a trained token, in weight versions."""
    rows = _rows(run, "batch")
    steps = len({row["train_step"] for row in rows}) // len(list(run.glob("iterations/*/batch.parquet")))
    return max(
        (row["train_step"] - 1) // steps * steps - min(span["version"] for span in row["policy_versions"])
        for row in rows
        if row["policy_versions"]
    )


def _passed_early(run: Path) -> bool:
    """Whether passes were made before a batch was filled."""
    manifests = run.glob("iterations/*/manifest.json")
    return sum(json.loads(path.read_text())["tasks"]["metrics"]["time/eager_s"] for path in manifests) > 0


def _of_two_shards(run: Path, of: int) -> bool:
    """Whether parts are of one shard each, of at least two, and some have samples of several groups.

    of: every so many groups of the draw, the same ones belong to a shard.
    """
    places = {row["group_id"]: row["ordinal"] for row in _rows(run, "prompts")}
    parts = [pq.read_table(path) for path in run.glob("iterations/*/rollouts/part-*.parquet")]
    groups = [set(part["group_id"].to_pylist()) for part in parts]
    shards: list[set[int]] = []
    for found in ({places[group] % of for group in of_part} for of_part in groups):
        met = [shard for shard in shards if shard & found]
        shards = [*(shard for shard in shards if shard not in met), found.union(*met)]
    return len(shards) > 1 and max(map(len, groups)) > 1


def _evaluated_in_parts(run: Path) -> bool:
    """Whether the evaluation of the second iteration is of several parts: a kill may come between them."""
    return len(list(run.glob("iterations/000001/evaluations/part-*.parquet"))) > 2


def _saved_by_fsdp(run: Path) -> bool:
    """Whether its checkpoints are those of FSDP's trainer."""
    markers = [json.loads(path.read_text()) for path in run.glob("checkpoints/*/complete.json")]
    return bool(markers) and all(marker["trainer"] == "fsdp" for marker in markers)


def _sees(run: Path) -> bool:
    """Whether samples with several pictures were trained on, and some with none."""
    counts = {len(image_names(json.loads(row["prompt"]))) for row in _rows(run, "batch")}
    return _saved_by_fsdp(run) and counts == {0, 1, 2}


def _trained_in_passes(run: Path) -> bool:
    """Whether each iteration made more steps than its batch names."""
    steps = [json.loads(path.read_text())["steps"] for path in sorted(run.glob("iterations/*/step.json"))]
    return sum(map(len, steps)) == 2 * len({row["train_step"] for row in _rows(run, "batch")})


def tailed_rows() -> str:
    """Sums whose answers are of very different lengths, as JSON lines: a few are far longer than most."""
    numbers = random.Random(1)
    return "".join(
        json.dumps(
            {
                "prompt": f"{a}+{b}=",
                "label": str((a + b) % 10),
                "sampling": {"max_new_tokens": min(LONGEST, max(4, int(numbers.lognormvariate(2.3, 1.0))))},
            }
        )
        + "\n"
        for a in range(10)
        for b in range(10)
    )


EVALUATION = {  # long enough to be killed half-way: several parts
    "evaluation.sets": [
        {
            "name": "held_out",
            "path": "held_out.jsonl",
            "samples_per_prompt": 4,
            "sampling": {"max_new_tokens": 16, "temperature": 1.0},
        }
    ]
}
TWO_SHARDS = {"placement.task_runner": "ray", "rollout.shards": 2}
EAGER = {
    **TAILED_ANSWERS,
    "pipeline.eager": True,
    "pipeline.eager_groups": 1,
    "trainer.global_batch": None,
    # on a fast machine all groups would be whole before the trainer is ready for the first
    "reward.function": "soak_rewards:contains_late",
}
FORMS = {
    "ahead": _pipeline(
        (("train_step", "in"), ("sync_weights", "before"), ("publish", "before")),
        ahead=1,
        on_update="finish",
        repeats=True,
    ),
    "evaluation_ahead": _pipeline(
        (
            ("evaluate_before", "before"),
            ("evaluate_before", "after"),
            ("train_step", "after"),
            ("publish", "in"),
        ),
        all_die_in="evaluate_before",
        at_work=_evaluated_in_parts,
        evaluation=EVALUATION | {"evaluation.every": 1},
        ahead=1,
        on_update="finish",
        repeats=True,
    ),
    "sent_again": _pipeline((("train_step", "after"), ("sync_weights", "in")), ahead=1, on_update="resend"),
    "sent_again_shards": _pipeline(
        (("train_step", "after"), ("sync_weights", "in")),
        ahead=1,
        on_update="resend",
        own_victims=("shard",),
        shards=TWO_SHARDS,
    ),
    "retracted": _pipeline((("train_step", "in"), ("sync_weights", "in")), ahead=1, on_update="retract"),
    "deferred": _pipeline(
        (("cut", "before"), ("cut", "after"), ("rollout", "cut"), ("rollout", "after"), ("publish", "in")),
        trainer={"trainer.store_logprobs": True},
        select="finish",
        reserve=0.5,
        max_staleness=1,
    ),
    "deferred_ahead": _pipeline(
        (("cut", "after"), ("rollout", "cut"), ("sync_weights", "in")),
        select="finish",
        reserve=0.5,
        ahead=1,
        max_staleness=2,
    ),
    "deferred_shards": _pipeline(
        (("cut", "after"), ("rollout", "cut"), ("rollout", "after")),
        select="finish",
        reserve=0.5,
        max_staleness=1,
        own_victims=("shard", "board"),
        shards=TWO_SHARDS,
    ),
    "eager": Form(
        settings=EAGER,
        driver_dies=(("eager_passes", "before"), ("filter", "in"), ("filter", "after"), ("train_step", "in")),
        all_die_in="eager_passes",
        at_work=_passed_early,
    ),
    "eager_shards": Form(
        settings={**EAGER, **TWO_SHARDS},
        driver_dies=(("eager_passes", "before"), ("filter", "in")),
        all_die_in="eager_passes",
        at_work=_passed_early,
        own_victims=("shard", "board"),
    ),
    "tool_ahead": Form(
        settings={
            **_several_turns(rollouts.SESSIONS["tool"]).settings,
            "pipeline.ahead": 1,
            "pipeline.on_update": "resend",
            "algorithm.correction.kind": "truncate",
        },
        driver_dies=((TURNS, "in"), ("train_step", "in"), ("sync_weights", "before")),
        all_die_in="rollout",
        at_work=lambda run: bool(_rows(run, "turns/part-*")) and _oldest(run) > 0,
        repeats=False,
    ),
    "flushed": Form(
        settings={**TAILED_ANSWERS, "rollout.flush_tokens": FLUSH},
        driver_dies=((TURNS, "in"), ("rollout", "after")),
        all_die_in="rollout",
        at_work=lambda run: any(row["kind"] == "answer" for row in _rows(run, "turns/part-*")),
    ),
    **{name: _several_turns(session) for name, session in rollouts.SESSIONS.items()},
    "levels": Form(
        settings={
            "data.sources": [
                {"name": "sums", "path": "train.jsonl"},
                {
                    "name": "growing",
                    "rows": "soak_rows:sums",
                    "weight": 3,
                    "levels": {"last": 6, "window": 2, "raise_from": 0.01, "groups": 3},
                },
            ]
        },
        driver_dies=(("sample_prompts", "in"), ("filter", "in")),
        all_die_in="rollout",
        at_work=lambda run: any(row["level"] for row in _rows(run, "prompts")),
    ),
    "sent_seldom": _pipeline(
        (("train_step", "after"), ("sync_weights", "before"), ("publish", "before")),
        evaluation={"run.iterations": 4},
        sync_every=2,
        repeats=True,
    ),
    "passes": Form(
        settings={"trainer.passes": 2},
        driver_dies=(("train_step", "after"), ("sync_weights", "in")),
        all_die_in="train_step",
        at_work=_trained_in_passes,
    ),
    "fsdp": Form(
        settings={"trainer.kind": "fsdp"},
        driver_dies=tuple(
            (task, when)
            for task in (
                *("sample_prompts", "rollout", "reward", "filter"),
                *("train_step", "sync_weights", "checkpoint", "publish"),
            )
            for when in ("before", "in", "after")
            if (task, when) != ("train_step", "in")
        ),
        all_die_in="train_step",
        at_work=_saved_by_fsdp,
    ),
    "pictures": Form(
        settings=seen_rows.SETTINGS,
        driver_dies=(("sample_prompts", "in"), ("train_step", "after"), ("evaluate", "after")),
        all_die_in="rollout",
        at_work=_sees,
    ),
    "reuse": Form(
        settings={
            "rollout.buffer": {"share": 0.25, "max_age": 4, "max_uses": 2, "choose": "prioritised"},
            "algorithm.correction.kind": "truncate",
        },
        driver_dies=(("sample_prompts", "in"), ("rollout", "in")),
        all_die_in="filter",
        at_work=lambda run: any(row["reused_from"] is not None for row in _rows(run, "batch")),
    ),
    "remote_reward": Form(
        settings={
            "reward.function": "millrace.connectors.rewards.http:http",
            "reward.options": {
                "url": f"${{env:{REWARD_SERVER}}}/now-and-then",
                "attempts": 2,
                "pause_s": 0.05,
            },
            "reward.concurrency": 8,
            "reward.max_failed_share": 0.5,
        },
        driver_dies=(("sample_prompts", "in"), ("filter", "in")),
        all_die_in="reward",
        at_work=lambda run: {row["scoring"] for row in _rows(run, "rewards/part-*")} == {"scored", "failed"},
        asks_server=True,
    ),
    "shards": Form(
        settings={**TWO_SHARDS, **EVALUATION},
        driver_dies=(("reward", "in"), ("filter", "in"), ("evaluate", "in"), ("evaluate", "after")),
        all_die_in="rollout",
        at_work=lambda run: _of_two_shards(run, 2) and _evaluated_in_parts(run),
        own_victims=("shard", "board"),
        own_die_in=("evaluate",),
    ),
    "two_nodes": Form(
        settings={
            "placement.task_runner": "ray",
            "placement.wait_s": 60,
            "engines.count": 3,  # with the rank, one process a CPU: both nodes have engines
            "engines.host": "0.0.0.0",
            **EVALUATION,
        },
        driver_dies=(("reward", "in"), ("train_step", "in"), ("evaluate", "in")),
        all_die_in="rollout",
        at_work=lambda run: _of_two_shards(run, 3) and _evaluated_in_parts(run),
        own_victims=("node", "shard", "board"),
        own_die_in=("reward", "train_step", "evaluate"),
        two_nodes=True,
    ),
    "evaluation": Form(
        settings={**EVALUATION, "rollout.part_groups": 1},
        driver_dies=(("evaluate", "before"), ("evaluate", "after")),
        all_die_in="evaluate",
        at_work=_evaluated_in_parts,
    ),
}
