"""An iteration's samples as Markdown, by group: the prompt as it was sent, the best and the worst answer, rewards, why it was dropped.

What a model, a tool or a data file wrote stands in code blocks: it is text, and no page renders it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from millrace.connectors.storage.parts import read_parts
from millrace.connectors.storage.store import Store
from millrace.core.plain_text import json_text

T = TypeVar("T")
A_GROUP = 2  # answers that are shown of it: the best and the worst
LONGEST = 6_000  # characters of a text; what is in the middle is left out
GENERATED = [
    "sample_id",
    "source",
    "prompt",
    "response",
    "label",
    "status",
    "reason",
    "dialogue",
    "response_length",
]
SCORED = ["sample_id", "reward", "reward_parts", "reward_texts", "answer", "reason"]
KEPT = ["sample_id", "reward", "reward_parts", "reward_texts", "answer", "advantage"]
JUDGED = ["sample_id", "group_id", "verdict", "reason"]


@dataclass(frozen=True, slots=True)
class _Group:
    group_id: str
    samples: tuple[str, ...]  # ids
    dropped: str | None  # why


def samples_text(folder: Store, title: str, most: int, systems: Mapping[str, str] | None = None) -> str:
    """At most `most` samples of an iteration's folder, two a group; at most half of the groups are dropped ones, of each reason in turn.

    Groups come from all over the iteration, in drawing order. systems: system messages by the source whose prompts got them.
    """
    groups = _groups(folder)
    shown = _chosen(groups, -(-most // A_GROUP))
    ids = pa.array([sample for group in shown for sample in group.samples])
    scores = {row["sample_id"]: row for row in _rows(folder, "rewards", SCORED, ids)}
    batch = folder.read_table("batch.parquet", "batch", columns=KEPT)
    scores |= {
        row["sample_id"]: row for row in _among(batch, ids)
    }  # of groups that wait in earlier iterations too
    answers = {
        group.group_id: _best_and_worst(group.samples, scores, most - at * A_GROUP)
        for at, group in enumerate(shown)
    }
    wanted = pa.array([sample for samples in answers.values() for sample in samples])
    rows = {row["sample_id"]: row for row in _rows(folder, "rollouts", GENERATED, wanted)}
    rows |= {
        row["sample_id"]: row
        for row in _among(folder.read_table("batch.parquet", "batch", columns=GENERATED), wanted)
    }
    lines = [f"# {title}", "", f"{len(shown)} of {len(groups)} groups."]
    for group in shown:
        lines += ["", *_group_lines(group, answers[group.group_id], rows, scores, systems or {})]
    return "\n".join(lines)


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, at equal distances."""
    if most <= 0 or not items:
        return []
    step = max(1, -(-len(items) // most))
    return list(items[::step])


def by_turns(reasons: Sequence[str | None], most: int) -> list[int]:
    """Places of at most `most` items, one of each reason in turn, in their order."""
    places: dict[str | None, list[int]] = {}
    for place, reason in enumerate(reasons):
        places.setdefault(reason, []).append(place)
    rounds = max(map(len, places.values()), default=0)
    order = [of[turn] for turn in range(rounds) for of in places.values() if turn < len(of)]
    return sorted(order[:most])


def code_block(text: str) -> list[str]:
    """A text as lines of a Markdown code block that it cannot end, whatever it holds."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    cut = text
    if len(text) > LONGEST:
        half = LONGEST // 2
        cut = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return [f"{fence}text", *cut.replace("\r", "\n").split("\n"), fence]


def _groups(folder: Store) -> list[_Group]:
    """The iteration's groups in drawing order, as they were judged. A group of whom a sample is kept is kept."""
    samples: dict[str, list[str]] = defaultdict(list)
    reasons: dict[str, list[str | None]] = defaultdict(list)
    for row in folder.read_table("verdicts.parquet", "verdicts", columns=JUDGED).to_pylist():
        samples[row["group_id"]].append(row["sample_id"])
        reasons[row["group_id"]].append(row["reason"] if row["verdict"] == "dropped" else None)
    return [
        _Group(name, tuple(ids), next(iter(reasons[name])) if all(reasons[name]) else None)
        for name, ids in samples.items()
    ]


def _chosen(groups: Sequence[_Group], most: int) -> list[_Group]:
    lost = [group for group in groups if group.dropped]
    taken = [lost[place] for place in by_turns([group.dropped for group in lost], most // 2)]
    kept = spread([group for group in groups if not group.dropped], most - len(taken))
    return [*kept, *taken]


def _rows(folder: Store, kind: str, columns: list[str], ids: pa.Array) -> list[dict[str, Any]]:
    return _among(read_parts(folder, kind, kind, columns=columns), ids)


def _among(table: pa.Table, ids: pa.Array) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.filter(pc.is_in(table.column("sample_id"), ids)).to_pylist()
    return found


def _best_and_worst(
    samples: Sequence[str], scores: Mapping[str, Mapping[str, Any]], most: int
) -> dict[str, str]:
    """Ids of the samples to show of a group, with what each is."""
    scored = [name for name in samples if scores.get(name, {}).get("reward") is not None]
    if not scored:
        return dict.fromkeys(samples[: min(1, most)], "Not scored")
    best = max(scored, key=lambda name: scores[name]["reward"])
    worst = min(scored, key=lambda name: scores[name]["reward"])
    if scores[best]["reward"] == scores[worst]["reward"]:
        worst = next((name for name in scored if name != best), best)
        named = {best: "One answer", worst: "Another"} if worst != best else {best: "The answer"}
    else:
        named = {best: "Best", worst: "Worst"}
    return dict(list(named.items())[:most])


def _group_lines(
    group: _Group,
    answers: Mapping[str, str],
    rows: Mapping[str, Mapping[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    systems: Mapping[str, str],
) -> list[str]:
    found = [scores[name]["reward"] for name in group.samples if name in scores]
    rewards = sorted((reward for reward in found if reward is not None), reverse=True)
    state = f"dropped: {group.dropped}" if group.dropped else "kept"
    lines = [
        f"## {len(group.samples)} samples, {state}",
        "",
        f"Group `{group.group_id}`; rewards {', '.join(map(figure, rewards)) or 'none'}.",
    ]
    first = next((rows[name] for name in answers if name in rows), None)
    if first is None:
        return lines  # dropped, and generated by an earlier iteration: its parts lie there
    prompt = prompt_text(first["prompt"], systems.get(first["source"]))
    lines += ["", f"**Prompt** of `{first['source']}`", "", *code_block(prompt)]
    if first["label"] is not None:
        lines += ["", "**Reference answer**", "", *code_block(_plain(first["label"]))]
    for name, what in answers.items():
        if name not in rows:
            continue
        row, score = rows[name], scores.get(name, {})
        lines += ["", f"**{what}**: {_about(row, score)}", "", *code_block(_answer(row))]
        for part, said in score.get("reward_texts") or ():
            lines += ["", f"`{_one_line(part)}` words:", "", *code_block(said)]
    return lines


def _about(row: Mapping[str, Any], score: Mapping[str, Any]) -> str:
    """One sentence on a sample: its figures, and why it failed if it did."""
    parts = [
        f"{name} {figure(value)}" for name, value in score.get("reward_parts") or () if value is not None
    ]
    advantage = score.get("advantage")
    said = [
        f"reward {figure(score['reward'])}" if score.get("reward") is not None else "not scored",
        *([f"({', '.join(parts)})"] if parts else []),
        *([f"advantage {figure(advantage)}"] if advantage is not None else []),
        f"{row['response_length']} tokens",
        row["status"],
    ]
    answer, reason = score.get("answer"), row["reason"] or score.get("reason")
    text = ", ".join(said).replace(", (", " (")
    text += f"; answer `{_one_line(answer)}`" if answer is not None else ""
    return text + (f"; `{_one_line(reason)}`" if reason else "")


def figure(value: object) -> str:
    """A number to three digits; other values as they are."""
    return f"{value:.3g}" if isinstance(value, float) else f"`{_one_line(str(value))}`"


def _one_line(text: str) -> str:
    return " ".join(text.replace("`", "'").split())[:300]


def prompt_text(stored: str, system: str | None = None) -> str:
    """A stored prompt for reading: a text as it is, messages with their roles.

    system: the message that its source puts before prompts without one.
    """
    content = json.loads(stored)
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return content if isinstance(content, str) and len(messages) == 1 else _dialogue(messages)


def _answer(row: Mapping[str, Any]) -> str:
    """What was generated: of several turns all that follows the prompt, turn by turn."""
    if not row["dialogue"]:
        return str(row["response"])
    messages, prompt = json.loads(row["dialogue"]), json.loads(row["prompt"])
    asked = prompt if isinstance(prompt, list) else [{"role": "user"}]
    added = messages[0].get("role") == "system" and asked[0].get("role") != "system"  # by its source
    return _dialogue(messages[len(asked) + added :])


def _dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"{message.get('role')}: {_said(message)}" for message in messages)


def _said(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json_text(content) if content else ""
    calls = message.get("tool_calls")
    return f"{text}{' ' if text and calls else ''}{json_text(calls) if calls else ''}"


def _plain(stored: str) -> str:
    content = json.loads(stored)
    return content if isinstance(content, str) else json_text(content)
