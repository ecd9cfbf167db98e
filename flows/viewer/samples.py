"""A group and a sample with their texts, tokens and turns: rows that are found by their ids and read with the wanted columns alone.

`group_places` knows where the rows of a group lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from millrace.connectors.storage.ranged import among
from millrace.core.contracts.ids import iteration_number, rollout_of
from millrace.core.contracts.turns import place_of_columns, rows_that_count
from millrace.core.errors import MissingFileError, StorageError
from millrace.core.plain_text import whole
from millrace.flows.viewer.group_places import GroupPlaces
from millrace.flows.viewer.index import SampleTable, SampleTables
from millrace.flows.viewer.messages import Message, conversation, readable_json
from millrace.flows.viewer.stored import Iteration, NotShown, Problems, ViewedRun
from millrace.flows.viewer.tokens import TokenRow, by_token, texts_of, vocabulary

OF_GROUP = (
    "sample_id",
    "group_id",
    "source",
    "index",
    "prompt",
    "label",
    "metadata",
    "response",
    "dialogue",
    "status",
    "role",
)
SPOKEN = (*OF_GROUP, "reason", "seed", "turns", "timings", "session_reward", "session_parts")
OF_TOKENS = (
    "sample_id",
    "group_id",
    "tokens",
    "response_length",
    "loss_mask",
    "trained_mask",
    "rollout_logprobs",
    "policy_versions",
)
OF_BATCH = (  # figures that a partial table lacks
    *("sample_id", "group_id", "reward", "response_length", "status", "advantage", "train_step"),
    *("answer", "label", "engine_id", "scoring", "policy_versions", "source"),
)
OF_ROLLOUTS = (
    *("sample_id", "group_id", "response_length", "status", "reason", "label", "engine_id"),
    *("policy_versions", "source"),
)
OF_REWARD = ("sample_id", "group_id", "reward", "reward_parts", "reward_texts", "answer", "scoring")
OF_TURNS = (
    *(
        "rollout_id",
        "group_id",
        "order",
        "branch",
        "parent",
        "parent_turns",
        "name",
        "event",
        "kind",
        "segment",
    ),
    *(
        "output_ids",
        "policy_versions",
        "engine_id",
        "ended",
        "new",
        "text",
        "tool",
        "arguments",
        "failed",
        "timings",
    ),
)
NO_ENTROPY = "no file keeps it by token; train/entropy has its mean"
NO_TRAINER = "the run did not store it: trainer.store_logprobs"
BY_TOKEN = "the trainer computes it by token, and no file keeps it"
NOT_TRAINED = "the sample was not trained"
NO_SEGMENTS = "no turn of it is stored: it is one answer, or some of its rows are gone"


@dataclass(frozen=True)
class GroupAnswer:
    """A sample of a group, with what was said and what it was worth."""

    sample: str
    index: int
    role: str | None
    messages: list[Message]  # after the prompt
    figures: Mapping[str, Any]  # of `SampleTable`
    reward_parts: dict[str, float | None]
    reward_texts: dict[str, str]


@dataclass(frozen=True)
class GroupView:
    """A prompt with all its answers."""

    iteration: int
    group: str
    source: str
    prompt: list[Message]
    label: str | None
    metadata: str | None
    answers: list[GroupAnswer]
    problems: list[NotShown]


@dataclass(frozen=True)
class SampleView:
    """One sample: its conversation, and what is stored about it."""

    iteration: int
    group: str
    sample: str
    messages: list[Message]
    label: str | None
    metadata: str | None
    figures: Mapping[str, Any]
    reward_parts: dict[str, float | None]
    reward_texts: dict[str, str]
    session: dict[str, Any]
    timings: dict[str, float]
    seed: int | None
    turns: int | None
    neighbours: list[str]  # all samples of its group
    problems: list[NotShown]


@dataclass(frozen=True)
class TurnBranch:
    """A branch of a rollout: its turns and calls in order."""

    branch: int
    name: str | None
    parent: int | None
    after: int | None  # turns of the parent before it
    events: list[dict[str, Any]]


class Samples:
    """The groups and samples of a run."""

    def __init__(self, run: ViewedRun, tables: SampleTables) -> None:
        self._run, self._tables = run, tables
        self._places = GroupPlaces(tables)
        self._vocabulary: list[Tokenizer | None] = []

    def group(self, index: int, group: str) -> GroupView:
        """A group with its answers. Raises MissingFileError if the iteration has no such group."""
        iteration, problems = self._run.iteration(index), Problems()
        table = self._tables.of(index)
        rows = list(self._rows(iteration, table, group, "rollouts", OF_GROUP, problems).values())
        figures = self._figures(iteration, table, group, problems)
        if not rows:
            raise _unknown("group", group, iteration, problems)
        rewards = self._rows(iteration, table, group, "rewards", OF_REWARD, problems)
        first, pictures = rows[0], self._run.pictures(problems)
        talks = {row["sample_id"]: conversation(row, self._system(row["source"]), pictures) for row in rows}
        asked = _common(list(talks.values()))
        return GroupView(
            iteration=iteration.number,
            group=group,
            source=first["source"],
            prompt=talks[first["sample_id"]][:asked],
            label=readable_json(first["label"]),
            metadata=readable_json(first["metadata"]),
            answers=[
                GroupAnswer(
                    sample=row["sample_id"],
                    index=row["index"],
                    role=row["role"],
                    messages=talks[row["sample_id"]][asked:],
                    figures=figures.get(row["sample_id"], {}),
                    **_parts(rewards.get(row["sample_id"])),
                )
                for row in rows
            ],
            problems=problems.listed(),
        )

    def sample(self, index: int, sample: str) -> SampleView:
        """A sample. Raises MissingFileError if the iteration has no such sample."""
        iteration, problems = self._run.iteration(index), Problems()
        table = self._tables.of(index)
        group = _group_of(table, sample)
        rows = self._rows(iteration, table, group, "rollouts", SPOKEN, problems)
        if sample not in rows:
            raise _unknown("sample", sample, iteration, problems)
        row = rows[sample]
        session = {name: row[name] for name in ("session_reward", "session_parts") if row[name] is not None}
        figures = self._figures(iteration, table, group, problems).get(sample, {})
        return SampleView(
            iteration=iteration.number,
            group=group,
            sample=sample,
            messages=conversation(row, self._system(row["source"]), self._run.pictures(problems)),
            label=readable_json(row["label"]),
            metadata=readable_json(row["metadata"]),
            figures={**figures, "reason": figures.get("reason") or row["reason"]},
            **_parts(self._rows(iteration, table, group, "rewards", OF_REWARD, problems).get(sample)),
            session=session,
            timings=dict(row["timings"]),
            seed=row["seed"],
            turns=row["turns"],
            neighbours=list(rows),
            problems=problems.listed(),
        )

    def tokens(self, index: int, sample: str, first: int = 0, most: int = 4000) -> TokenRow:
        """A sample's tokens from `first` on, at most `most`. Raises MissingFileError if the iteration has no such sample."""
        iteration, problems = self._run.iteration(index), Problems()
        table = self._tables.of(index)
        group = _group_of(table, sample)
        rows = self._rows(iteration, table, group, "rollouts", OF_TOKENS, problems)
        if sample not in rows:
            raise _unknown("sample", sample, iteration, problems)
        row = rows[sample]
        figures = self._figures(iteration, table, group, problems).get(sample, {})
        values, missing = self._by_token(iteration, row, figures, problems)
        ids: list[int] = row["tokens"]
        prompt = len(ids) - row["response_length"]
        shown = slice(first, first + most)
        tokenizer = self._tokenizer()
        return TokenRow(
            ids=ids[shown],
            texts=[whole(text) for text in texts_of(tokenizer, ids[shown])] if tokenizer else None,
            prompt=prompt,
            first=first,
            count=len(ids),
            values={name: [*[None] * prompt, *found][shown] for name, found in values.items()},
            missing=missing,
        )

    def branches(self, index: int, sample: str) -> list[TurnBranch]:
        """The tree of turns of a sample's rollout; empty for a rollout of one turn."""
        iteration, problems = self._run.iteration(index), Problems()
        rows = self._turns(iteration, self.group_of(index, sample), rollout_of(sample), problems)
        found: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            found.setdefault(row["branch"], []).append(row)
        return [
            TurnBranch(
                branch=branch,
                name=events[0]["name"],
                parent=events[0]["parent"],
                after=events[0]["parent_turns"],
                events=[_event(row) for row in events],
            )
            for branch, events in sorted(found.items())
        ]

    def _by_token(
        self, iteration: Iteration, row: Mapping[str, Any], figures: Mapping[str, Any], problems: Problems
    ) -> tuple[dict[str, list[float | None]], dict[str, str]]:
        """Figures by response token, and a reason for each that is missing."""
        length, mask = row["response_length"], row["loss_mask"]
        trained = row["trained_mask"] or mask
        generated = [value if on else None for value, on in zip(row["rollout_logprobs"], mask, strict=True)]
        values: dict[str, list[float | None]] = {
            "logprob": generated,
            "mask": [*trained],
            "version": by_token(row["policy_versions"], length),
        }
        missing = {"entropy": NO_ENTROPY}
        theirs = self._trainer_logprobs(iteration, row["sample_id"], problems)
        if theirs is None:
            missing["gap"] = NO_TRAINER if not iteration.of_kind("logprobs") else NOT_TRAINED
        else:
            pairs = zip(generated, theirs, strict=True)
            values["gap"] = [None if engine is None else engine - trainer for engine, trainer in pairs]
        if figures.get("advantage") is None:
            missing["advantage"] = BY_TOKEN if figures.get("verdict") == "kept" else NOT_TRAINED
        else:
            values["advantage"] = [figures["advantage"] if on else None for on in trained]
        segments = self._segments(iteration, row, problems)
        if segments is None:
            missing["segment"] = NO_SEGMENTS
        else:
            values["segment"] = segments
        return values, missing

    def _segments(
        self, iteration: Iteration, row: Mapping[str, Any], problems: Problems
    ) -> list[float | None] | None:
        """The number of the segment that made each token; None if what is stored of turns does not fit the tokens."""
        sample = row["sample_id"]
        rows = self._turns(iteration, row["group_id"], rollout_of(sample), problems)
        branch = int(sample.rpartition(".")[2]) if "." in sample else 0
        lengths = [len(each["output_ids"]) for each in _way(rows, branch) if each["kind"] != "call"]
        if not rows or sum(lengths) != sum(row["loss_mask"]):
            return None
        numbers = iter([number for number, length in enumerate(lengths) for _ in range(length)])
        return [next(numbers) if on else None for on in row["loss_mask"]]

    def _turns(
        self, iteration: Iteration, group: str, rollout: str, problems: Problems
    ) -> list[dict[str, Any]]:
        rows = self._found(iteration, "turns", group, OF_TURNS, problems)
        return rows_that_count([row for row in rows if row["rollout_id"] == rollout], place_of_columns)

    def _trainer_logprobs(self, iteration: Iteration, sample: str, problems: Problems) -> list[float] | None:
        entries = iteration.of_kind("logprobs")
        columns = ("sample_id", "trainer_logprobs")
        keep = among("sample_id", [sample])
        for _, _, table in iteration.tables.groups(entries, "logprobs", columns, keep, problems.note):
            ids = table.column("sample_id").to_pylist()
            if sample in ids:
                found: list[float] = table.column("trainer_logprobs")[ids.index(sample)].as_py()
                return found
        return None

    def _rows(
        self,
        iteration: Iteration,
        table: SampleTable,
        group: str,
        parts: str,
        columns: Sequence[str],
        problems: Problems,
    ) -> dict[str, dict[str, Any]]:
        """The rows of a group by sample: of the batch, and of these parts if not all its samples are there."""
        listed = _listed(table, group)
        rows: dict[str, dict[str, Any]] = {}
        if not listed or any(each["verdict"] in (None, "kept") for each in listed.values()):
            rows = {
                row["sample_id"]: row for row in self._found(iteration, "batch", group, columns, problems)
            }
        if not rows or not set(listed) <= set(rows):
            found = self._found(iteration, parts, group, columns, problems)
            rows |= {row["sample_id"]: row for row in found if row["sample_id"] not in rows}
        return {name: rows[name] for name in sorted(rows)}

    def _found(
        self, iteration: Iteration, kind: str, group: str, columns: Sequence[str], problems: Problems
    ) -> list[dict[str, Any]]:
        """The rows of a group in the tables of a kind. Reads the row groups that hold it, and these columns of them."""
        entries = iteration.of_kind(kind)
        if not entries:
            return []
        places = self._places.of(iteration, kind, group, problems)
        paths = {path for path, _ in places}
        found: list[dict[str, Any]] = []
        for _, _, table in iteration.tables.groups(
            [entry for entry in entries if entry.path in paths],
            kind,
            columns,
            lambda entry, number, _: (entry.path, number) in places,
            problems.note,
        ):
            ids = table.column("group_id").to_pylist()
            here = [at for at, name in enumerate(ids) if name == group]
            # `take` and `filter` would import pandas, for half of what a first sample takes
            found += [row for at in here for row in table.slice(at, 1).to_pylist()]
        return found

    def _figures(
        self, iteration: Iteration, table: SampleTable, group: str, problems: Problems
    ) -> dict[str, dict[str, Any]]:
        """The figures of a group's samples. What a partial table lacks is read here."""
        listed = _listed(table, group)
        if not table.partial:
            return listed
        own: dict[str, dict[str, Any]] = {name: {} for name in listed}
        verdicts = {row["verdict"] for row in listed.values()}
        kinds: list[tuple[str, tuple[str, ...]]] = [("batch", OF_BATCH)] if "kept" in verdicts else []
        if verdicts - {"kept"}:
            kinds += [("rollouts", OF_ROLLOUTS), ("rewards", OF_REWARD)]
        for kind, columns in kinds:
            for row in self._found(iteration, kind, group, columns, problems):
                own.setdefault(row["sample_id"], {}).update(row)
        return {name: _filled(row, own[name]) for name, row in listed.items()}

    def group_of(self, index: int, sample: str) -> str:
        """The id of a sample's group; of an unknown sample, as its id says."""
        return _group_of(self._tables.of(index), sample)

    def _system(self, source: str) -> str | None:
        sources = self._run.settings.get("data", {}).get("sources", ())
        return next((each.get("system") for each in sources if each.get("name") == source), None)

    def _tokenizer(self) -> Tokenizer | None:
        if not self._vocabulary:
            self._vocabulary.append(vocabulary(self._run.folder, self._run.settings))
        return self._vocabulary[0]


def _listed(table: SampleTable, group: str) -> dict[str, dict[str, Any]]:
    """The samples of a group in the table of its iteration."""
    rows = table.ask("SELECT * FROM samples WHERE group_id = ?", [group])
    return {str(row["sample_id"]): row for row in rows}


def _group_of(table: SampleTable, sample: str) -> str:
    rows = table.ask("SELECT group_id FROM samples WHERE sample_id = ?", [sample])
    return str(rows[0]["group_id"]) if rows else rollout_of(sample).rpartition("-")[0]


def _filled(listed: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a sample in a partial table, with what its rows have."""
    versions = own.get("policy_versions") or ()
    more = {
        **own,
        "length": own.get("response_length"),
        "engine": own.get("engine_id"),
        "version": versions[0]["version"] if versions else None,
    }
    return {name: more.get(name) if value is None else value for name, value in listed.items()}


def _way(rows: Sequence[Mapping[str, Any]], branch: int) -> list[Mapping[str, Any]]:
    """The segments and calls that led to a branch's last turn, with the branches that it started from."""
    own = [row for row in rows if row["branch"] == branch]
    if not own or own[0]["parent"] is None:
        return list(own)
    before = _way(rows, own[0]["parent"])
    turns: list[Mapping[str, Any]] = []
    for row in before:
        done = len({each["event"] for each in turns if each["kind"] != "call"} - {row["event"]})
        if row["kind"] != "call" and done >= own[0]["parent_turns"]:
            break
        turns.append(row)
    return [*turns, *own]


def _event(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("event", "kind", "segment", "engine_id", "ended", "tool", "failed")
    return {
        **{name: row[name] for name in names},
        "text": whole(row["text"]),
        "new": None if row["new"] is None else whole(row["new"]),
        "arguments": None if row["arguments"] is None else whole(row["arguments"]),
        "tokens": len(row["output_ids"]),
        "versions": [span["version"] for span in row["policy_versions"]],
        "timings": dict(row["timings"]),
    }


def _parts(row: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts of a reward, by name."""
    numbers = dict(row["reward_parts"] or ()) if row else {}
    texts = dict(row["reward_texts"] or ()) if row else {}
    return {"reward_parts": numbers, "reward_texts": {name: whole(text) for name, text in texts.items()}}


def _common(talks: Sequence[Sequence[Message]]) -> int:
    """How many messages all conversations start with alike, before any that was generated."""
    count = 0
    for messages in zip(*talks, strict=False):
        if any(message != messages[0] or message.generated for message in messages):
            break
        count += 1
    return count


def _unknown(what: str, name: str, iteration: Iteration, problems: Problems) -> StorageError:
    broken = problems.listed()
    if broken:
        return StorageError(broken[0].what, where=broken[0].where, remedy=broken[0].remedy)
    return MissingFileError(
        f"has no {what} {name}",
        where=f"iteration {iteration_number(iteration.index)}",
        remedy="open it from the iteration's list",
    )
