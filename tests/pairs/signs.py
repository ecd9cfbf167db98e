"""How each feature shows in what a run left: a column, a figure or a file that is otherwise not there, or otherwise different."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tests.pairs.features import LONGEST, MEMORY_MB, PROMPTS, SAMPLES, SESSION, TOP_P
from tests.pairs.runs import Left
from tests.support.engine_process import reference_logits

Sign = Callable[[Left], bool]
ROUNDING = 0.01  # of chances, in bfloat16


def _figure(name: str, holds: Callable[[float], bool] = lambda value: True) -> Sign:
    """An iteration has the figure, and it is such a number."""
    return lambda left: any(name in found and holds(found[name]) for found in left.figures)


def _step(name: str, holds: Callable[[Any], bool] = lambda value: True) -> Sign:
    """A step of the trainer has the number."""
    return lambda left: any(name in step and holds(step[name]) for steps in left.steps for step in steps)


def _trained_under(section: str, *path: str, value: Any) -> Sign:
    """The trainer's ranks made a step under the setting: what a rank had, not what a file says."""

    def holds(left: Left) -> bool:
        at: Any = left.steps[0][0]["settings"]
        for part in (section, *path):
            at = at[part]
        return bool(at == value)

    return holds


def _saved_by(name: str, value: str) -> Sign:
    """Each checkpoint's marker has the value."""

    def holds(left: Left) -> bool:
        markers = [json.loads(path.read_text()) for path in left.folder.glob("checkpoints/*/complete.json")]
        return bool(markers) and all(marker.get(name) == value for marker in markers)

    return holds


def _rows(table: str, holds: Callable[[dict[str, Any]], bool]) -> Sign:
    """A row of the table is such."""
    return lambda left: any(holds(row) for row in left.rows(table))


def _source(name: str) -> Sign:
    return _rows("prompts", lambda row: row["source"] == name)


_is_older = _figure("train/staleness_max", lambda age: age >= 1)


def _turn_rows(kind: str, tool: str = "") -> Sign:
    def holds(left: Left) -> bool:
        rows = left.rows("turns/part-*")
        return any(row["kind"] == kind and (not tool or row["tool"] == tool) for row in rows)

    return holds


def _of_rewards(source: str, holds: Callable[[float], bool]) -> Sign:
    """The rewards of a source's samples are such; of rollouts that give their own, none is looked at."""

    def each(left: Left) -> bool:
        scored = [
            row
            for row in left.rows("batch")
            if row["source"] == source and row["reward"] is not None and row["session_reward"] is None
        ]
        return all(holds(row["reward"]) for row in scored) and bool(left.rows("prompts"))

    return each


def _in_the_nucleus(left: Left) -> bool:
    """Of each token that the first weights drew, the likelier tokens have no more than the share. Without the limit a tenth have more."""
    likelier = [
        float(chances[chances > chances[token]].sum())
        for row in left.rows("rollouts/part-*")
        if {span["version"] for span in row["policy_versions"]} == {0}
        for chances, token in _drawn_tokens(left, row)
    ]
    return len(likelier) > 60 and max(likelier) < TOP_P + ROUNDING


def _drawn_tokens(left: Left, row: dict[str, Any]) -> Iterator[tuple[torch.Tensor, int]]:
    """Each token of a row that an engine drew, and the chances of all tokens in its place."""
    tokens, count = row["tokens"], row["response_length"]
    chances = reference_logits(left.model, tokens[:-count], tokens[-count:]).softmax(-1)
    drawn = zip(chances, tokens[-count:], row["loss_mask"], strict=True)
    return ((each, token) for each, token, on in drawn if on)


def _distinct(values: Iterable[Any]) -> int:
    return len(set(values))


def _files(pattern: str) -> Sign:
    return lambda left: any(left.folder.glob(pattern))


SIGNS: dict[str, Sign] = {
    "session": _figure("session/turns_mean", lambda turns: turns >= 1),
    "tools": _turn_rows("call", "note"),
    "mcp": _figure("session/turns_mean", lambda turns: turns >= 1),
    "environment": _rows("turns/part-*", lambda row: row["kind"] == "call"),
    "named_rollouts": _rows(
        "rollouts/part-*", lambda row: dict(row["session_parts"] or ()).get("solo") == 1.0
    ),
    "trace": lambda left: any((left.folder / "traces" / "000001").iterdir()),
    "admission": _figure("rollout/in_flight_limit"),
    "flush": lambda left: (
        any(row["kind"] == "answer" for row in left.rows("turns/part-*"))
        or all(row["response_length"] <= 16 for row in left.rows("rollouts/part-*"))
    ),
    "stops": lambda left: (
        any(row["ended"] == "stop" for row in left.rows("turns/part-*"))
        or any(
            row["status"] == "completed" and row["response_length"] < LONGEST
            for row in left.rows("rollouts/part-*")
        )
    ),
    "top_p": _in_the_nucleus,
    "buffer": _rows("batch", lambda row: row["reused_from"] is not None),
    "buffer_filter": _rows("batch", lambda row: row["reused_from"] is not None),
    "shards": lambda left: len(left.paths("rollouts/part-*")) > 1,
    "ahead": _is_older,
    "finish_requests": lambda left: (
        _is_older(left)
        and all(_distinct(span["version"] for span in row["policy_versions"]) <= 1 for row in left.batch)
    ),
    "retract": _is_older,
    "keep": _is_older,
    "min_ess": _figure("train/ess", lambda share: 0 < share <= 1),
    "finish": _files("iterations/*/cut.json"),
    "max_token_age": _figure("train/too_old_share"),
    "oversample": lambda left: (
        max(_distinct(row["ordinal"] for row in rows) for rows in _drawn(left)) > PROMPTS
    ),
    "eager": _figure("time/eager_s"),  # 0 where all groups are whole at once
    "sync_every": _is_older,
    "rollouts_only": lambda left: (
        not any("loss" in step for steps in left.steps for step in steps)
        and not any(left.folder.glob("checkpoints/*/complete.json"))
    ),
    "rollouts_from": lambda left: (left.folder.parent / "stored").exists() or left.has("s3"),
    "critic": _figure("train/value_loss"),
    "returns": lambda left: (
        _trained_under("configuration", "algorithm", "advantage", "kind", value="reinforce_plus_plus")(left)
        and all(row["advantage"] is None or row["advantage"] == 0 for row in left.batch)
    ),
    "own_advantage": lambda left: (
        {abs(row["advantage"]) for row in left.batch if row["advantage"] is not None} <= {0.0, 0.375}
    ),
    "teacher": _figure("train/teacher_kl"),
    "served_teacher": _figure("teacher/seconds_mean"),
    "teacher_top_k": _rows("rewards/part-*", lambda row: bool(row["teacher_top_tokens"])),
    "hint": _rows("rewards/part-*", lambda row: bool(row["teacher_hint"])),
    "kl": _figure("train/kl_coef", lambda value: value > 0),
    "kl_in_reward": _figure("train/kl"),
    "reference": _figure("train/kl"),
    "entropy": _trained_under("configuration", "algorithm", "entropy_coef", value=0.01),
    "gspo": _trained_under("configuration", "algorithm", "loss", "kind", value="gspo"),
    "own_loss": _step("of_the_users"),
    "sft": lambda left: not left.paths("rollouts/part-*") and bool(left.steps),
    "whiten": _trained_under("configuration", "algorithm", "whiten", value=True),
    "overlong": lambda left: all(
        row["shaped_reward"] != row["reward"]
        for row in left.batch
        if row["response_length"] > _budget(left) - 8 and row["shaped_reward"] is not None
    ),
    "shaping": lambda left: any(row["shaped_reward"] != row["reward"] for row in left.batch),
    "icepop": _figure("train/correction_mean"),
    "sequence_masks": _figure("train/left_out_share"),
    "sampler_ratio": _trained_under("configuration", "algorithm", "old_logprobs", value="rollout"),
    "constant": _trained_under("configuration", "algorithm", "constant_length", value=32),
    "zero_variance": lambda left: any(
        "dropped_zero_variance" in name for found in left.figures for name in found
    ),
    "group_filter": lambda left: (
        any(found["filter/dropped_group_filter"] > 0 for found in left.figures)
        or not any(sum(map(ord, str(row["prompt"]))) % 4 == 0 for row in left.rows("prompts"))
    ),
    "group_reward": lambda left: bool(_parts(left, "rank")) or _scored_by_rollouts(left),
    "named_rewards": _of_rewards("graded", lambda reward: reward >= 11),
    "remote_limits": lambda left: _parts(left, "memory_mb") == {MEMORY_MB},
    "mixture": _of_rewards("second", lambda reward: reward <= -12),
    "levels": _source("growing"),
    "pools": _source("few"),
    "stages": lambda left: {found["curriculum/stage"] for found in left.figures} == {0.0, 1.0},
    "streamed": lambda left: all(
        source.get("streamed") for source in left.record["data"][-1]["sources"].values()
    ),
    "row_sampling": lambda left: all(
        sum(row["loss_mask"]) <= 5 * max(1, row["turns"] or 1)
        for row in left.rows("rollouts/part-*")
        if row["source"] == "short"
    ),
    "template": _source("told"),
    "evaluation": _files("eval/held_out/*.parquet"),
    "pass_at_k": lambda left: (
        any("eval/several/pass_at_2" in found for found in left.figures) or left.has("sft")
    ),
    "evaluation_ahead": _files("eval/ahead/*.parquet"),
    "keep_best": _files("eval/best/*.parquet"),
    "background_checkpoint": _files("checkpoints/*/complete.json"),
    "exports": lambda left: len(list(left.folder.glob("exports/*"))) >= 2,
    "tensorboard": lambda left: any((left.home / "tensorboard").rglob("events*")),
    "mlflow": lambda left: (left.home / "mlflow.db").exists(),
    "s3": _files("run.json"),
    "prepare": lambda left: (left.home.parent / "prepared").exists(),
    "steps": lambda left: all(
        _distinct(row["train_step"] for row in rows) == PROMPTS * SAMPLES / 4 for rows in left.batches
    ),
    "passes": lambda left: all(
        len(steps) == 2 * _distinct(row["train_step"] for row in rows)
        for steps, rows in zip(left.steps, left.batches, strict=True)
    ),
    "stored_logprobs": lambda left: any(left.folder.glob("iterations/*/logprobs*")),
    "stages_of_the_model": _trained_under("numerics", "parallel", "pipeline", value=2),
    "fsdp": _saved_by("trainer", "fsdp"),
    "copies_of_weights": _trained_under("numerics", "parallel", "replicate", value=2),
    "context": _trained_under("numerics", "parallel", "context", value=2),
    "recompute": _trained_under("numerics", "recompute", value="full"),
    "host_optimizer": _trained_under("configuration", "trainer", "optimizer", "offload", value=0.5),
    "plain_optimizer": _trained_under("configuration", "trainer", "optimizer", "distributed", value=False),
    "lora": lambda left: any(left.folder.glob("exports/*/adapter_config.json")),
    "bfloat16": _trained_under("numerics", "dtype", value="bfloat16"),
    "two_engines": lambda left: (
        _distinct(row["engine_id"] for row in left.rows("rollouts/part-*")) == 2 or left.has("router")
    ),  # which says not where a request went
    "external": lambda left: left.asked > 0,
    "router": lambda left: {row["engine_id"] for row in left.rows("rollouts/part-*")} == {"sglang-router"},
    "lora_by_name": lambda left: all({"export", "load"} == record["phases"].keys() for record in left.syncs),
    "broadcast": _figure("time/sync_transfer_s", lambda seconds: seconds > 0),
    "prompt_gap": _figure("sync/prompt_gap"),
    "weights_by_url": lambda left: any(name.endswith(".safetensors") for name in left.uploaded),
}


def _parts(left: Left, name: str) -> set[float]:
    """What the rewards of the run have as a part."""
    found = [dict(row["reward_parts"] or ()) for row in left.rows("rewards/part-*")]
    return {parts[name] for parts in found if name in parts}


def _scored_by_rollouts(left: Left) -> bool:
    """Whether each rollout gives its own reward, so that no reward function is called."""
    return all(row["session_reward"] is not None for row in left.rows("rollouts/part-*"))


def _budget(left: Left) -> int:
    """Most tokens of an answer, or of a dialogue."""
    sessions = ("session", "tools", "mcp", "environment", "named_rollouts")
    return SESSION["rollout.session.max_tokens"] if any(map(left.has, sessions)) else LONGEST


def _drawn(left: Left) -> list[list[dict[str, Any]]]:
    """The drawn prompts of each iteration."""
    rows = left.rows("prompts")
    return [
        [row for row in rows if row["iteration"] == at] for at in sorted({row["iteration"] for row in rows})
    ]
