"""Check the rows of each file of prompts: keys, labels, lengths, and how many cannot be used.

Imports no torch and no transformers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, cast

from millrace.connectors.huggingface.answer_ends import unseen_by_row
from millrace.connectors.huggingface.tokenizer import is_plain
from millrace.connectors.huggingface.trained_turns import Piece
from millrace.connectors.storage.prompts import first_rows
from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.data import Source
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.config.evaluation import EvalSet
from millrace.core.config.parts.problems import Problem
from millrace.core.config.reward import RewardFunction
from millrace.core.contracts.rows.chat_options import TEMPLATE_KWARGS, TOOLS
from millrace.core.contracts.rows.own_sampling import SAMPLING
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, far_too_long, refuse, too_long
from millrace.core.errors import MillraceError, MissingColumnError
from millrace.core.hooks import RewardInput
from millrace.core.model_folder.tokenizer_file import before_text_of
from millrace.core.rewards.forms import answer_of, reward_of
from millrace.flows.preflight.check_dialogues import check_dialogues
from millrace.flows.preflight.check_model import Checkpoint, special_tokens
from millrace.flows.preflight.check_prompts import rendered
from millrace.tasks.data.own_rows import OwnRows

ROWS, BYTES = 20_000, 8 << 20  # limits of reading a file on a disk
ROWS_FROM_AFAR, BYTES_FROM_AFAR = 1_000, 1 << 20
REMEDIES = {  # by the kind of reason why no row can be used
    "not UTF-8": "save the file as UTF-8; unpack it if it is compressed",
    "not text": "leave these parts out, or write as text what they show",
    "wrong type": "change the column, or name another one in the source",
    "bad sampling": "correct the column, or set sampling_key to null",
    "too long": "shorten the prompts, or raise data.max_prompt_tokens",
}
ARRAY = "it is one JSON array; write an object a line, as `jq -c '.[]' FILE > FILE.jsonl` does"


class Rows:
    """The first rows of a source, usable and unusable."""

    def __init__(self, field: str, source: PromptRows) -> None:
        self.field = field
        self.source = source
        self.usable: list[PromptRow] = []
        self.refused: list[Quarantined] = []
        self.total = 0  # number of rows of the file, maybe estimated
        self.whole = False  # whether all of them were read
        self.pieces: dict[int, list[Piece]] = {}  # pieces of the first trained dialogues, by row
        self.texts: list[str] = []  # texts of the first usable rows, in the form that is sent
        self.lengths: list[int] = []  # tokens of these texts
        self.too_long: list[Quarantined] = []

    @property
    def place(self) -> str:
        """The field that names the origin of the rows."""
        return f"{self.field}.rows" if self.function else f"{self.field}.path"

    @property
    def origin(self) -> str:
        """The origin of the rows, as messages name it."""
        return self.function.function if self.function else self.source.path

    @property
    def function(self) -> UserFunction | None:
        """The function that makes the rows, if the source has one."""
        return self.source.rows if isinstance(self.source, Source) else None

    @property
    def unusable(self) -> list[Quarantined]:
        """Rows that a run sets aside, in file order."""
        return sorted(self.refused + self.too_long, key=lambda item: item.row)

    @property
    def seen(self) -> int:
        """Rows that were read."""
        return len(self.usable) + len(self.refused)

    @property
    def complete(self) -> bool:
        """Whether every row was read, and every usable row tokenised, so that `unusable` is complete."""
        return self.whole and len(self.lengths) == len(self.usable)

    def read(self) -> list[Problem]:
        """Read the rows; returns problems of the file itself. Runs in its own thread."""
        if isinstance(self.source, Source) and self.source.rows:
            return self._made(self.source)
        path = self.source.path
        most = (ROWS_FROM_AFAR, BYTES_FROM_AFAR) if "://" in path else (ROWS, BYTES)
        try:
            self.usable, self.refused, self.total, self.whole = first_rows(self.source, *most)
        except MissingColumnError as error:
            return [Problem(f"{self.field}.prompt_key", self.source.prompt_key, error.reason, error.remedy)]
        except MillraceError as error:
            return [Problem(f"{self.field}.path", path, error.reason, error.remedy or "correct the path")]
        if self.usable:
            return []
        if not self.refused:
            remedy = "give a file with prompts, or correct the slice at the end of its path"
            return [Problem(f"{self.field}.path", path, "holds no rows", remedy)]
        return [self._none_usable()]

    def _made(self, source: Source) -> list[Problem]:
        """Read the first rows that a function makes."""
        try:
            rows = OwnRows(source)
            try:
                self.total = sum(rows.sizes().values())
                level = next(iter(rows.sizes()))
                found = rows.read(level, range(min(ROWS_FROM_AFAR, rows.sizes()[level])))
            finally:
                rows.close()
        except MillraceError as error:
            return [Problem(self.place, self.origin, error.reason, error.remedy or "correct the function")]
        self.usable = [item for item in found if isinstance(item, PromptRow)]
        self.refused = [item for item in found if isinstance(item, Quarantined)]
        self.whole = self.total == len(found)
        return [] if self.usable else [self._none_usable()]

    def set_aside(self, limit: int) -> list[Problem]:
        """Refuse rows of far more than `limit` tokens before they are rendered or tokenised; a problem if no row is left."""
        found = [far_too_long(row, self.source, limit) for row in self.usable]
        self.refused += [item for item in found if item]
        self.usable = [row for row, item in zip(self.usable, found, strict=True) if not item]
        return [self._none_usable()] if found and not self.usable else []

    def refuse_stops(self, tokenizer: Any, *, skips_special: bool) -> list[Problem]:
        """Refuse rows whose own stops occur in no answer; a problem if no row is left. skips_special: of answers' texts."""
        if tokenizer is None or not self.usable:
            return []
        special = special_tokens(tokenizer) if skips_special else {}
        size = tokenizer.get_vocab_size()
        unseen = [unseen_by_row(row.metadata, special, size) for row in self.usable]
        self.refused += [
            refuse(self.source, row.row, reason, str(row.metadata[SAMPLING]))
            for row, reason in zip(self.usable, unseen, strict=True)
            if reason
        ]
        self.usable = [row for row, reason in zip(self.usable, unseen, strict=True) if not reason]
        return [] if self.usable else [self._none_usable()]

    def measure(self, tokenizer: Any, limit: int) -> None:
        """Count the tokens of the texts, and note the rows with more than `limit`."""
        before = len(before_text_of(tokenizer))
        pieces = [[piece.text for piece in cut] for cut in self.pieces.values()]
        added = [before if is_plain(row.prompt, self.source.chat) else 0 for row in self.usable]
        self.lengths = [
            sum(len(tokenizer.encode(part, add_special_tokens=False).ids) for part in parts) + more
            for parts, more in zip(pieces or [[text] for text in self.texts], added, strict=False)
        ]
        self.too_long = [
            too_long(row, self.source, length, limit)
            for row, length in zip(self.usable, self.lengths, strict=False)
            if length > limit
        ]

    def _none_usable(self) -> Problem:
        kind, count = Counter(item.reason.split(":")[0] for item in self.refused).most_common(1)[0]
        example = next(item for item in self.refused if item.reason.startswith(kind))
        if kind == "missing key":
            return Problem(
                f"{self.field}.prompt_key",
                self.source.prompt_key,
                f"none of the first {len(self.refused)} rows of {self.origin} has it: {example.excerpt}",
                "set it to the key that holds the prompt",
            )
        array = self.refused[0].excerpt.lstrip().startswith("[")
        return Problem(
            self.place,
            self.origin,
            f"none of its first {len(self.refused)} rows can be used; {count} times {example.reason}",
            ARRAY
            if array
            else "return rows with a prompt"
            if self.function
            else REMEDIES.get(kind, "write a JSON object with the prompt on each line"),
        )


def sources(config: RunConfig) -> list[Rows]:
    """Every source and evaluation set, before reading."""
    training = [Rows(f"data.sources.{source.name}", source) for source in config.data.sources]
    held_out = [Rows(f"evaluation.sets.{held_out.name}", held_out) for held_out in config.evaluation.sets]
    return training + held_out


def check_rows(config: RunConfig, rows: Rows, model: Checkpoint) -> Iterator[Problem]:
    """Problems of the rows that were read, under the model's template and tokenizer; fills their texts and lengths."""
    limit, training = config.data.max_prompt_tokens, rows.field.startswith("data.")
    yield from rows.set_aside(limit)
    sampling = config.rollout.sampling if training else cast(EvalSet, rows.source).sampling
    yield from rows.refuse_stops(model.tokenizer, skips_special=sampling.skip_special_tokens)
    if not rows.usable:
        return
    yield from _metadata(rows)
    if rows.source.loss_on == "answer":
        yield from _labels(config, rows)
        rows.texts = yield from rendered(rows, model)
    else:
        yield from check_dialogues(rows, model)
    if model.tokenizer is not None and rows.texts:
        rows.measure(model.tokenizer, limit)
        if len(rows.too_long) == len(rows.lengths):
            yield Problem(
                "data.max_prompt_tokens",
                limit,
                f"each of the first {len(rows.lengths)} prompts of {rows.origin} is longer, the shortest "
                f"{min(rows.lengths)} tokens",
                f"set it to {max(rows.lengths)} or more",
            )
            return
    bad, share = len(rows.unusable), config.data.max_quarantined_share
    if training and rows.complete and bad > share * rows.total:
        first = rows.unusable[0]
        yield Problem(
            rows.place,
            rows.origin,
            f"{bad} of its {rows.total} rows cannot be used, and data.max_quarantined_share is {share:g}; "
            f"the first is row {first.row}: {first.reason}",
            "correct the rows or the keys of the source, or raise data.max_quarantined_share",
        )


def _labels(config: RunConfig, rows: Rows) -> Iterator[Problem]:
    key = rows.source.label_key
    labels = [row.label for row in rows.usable]
    missing = all(label is None for label in labels)
    field, path = f"{rows.field}.label_key", rows.origin
    reward = rows.source.reward or config.reward
    if rows.source.label_from_prompt and missing:
        yield Problem(
            f"{rows.field}.label_from_prompt",
            True,
            f"none of the first {len(labels)} prompts of {path} ends in a text of the assistant",
            "set it to false, and label_key to the key that holds the reference answer",
        )
    elif key not in (None, "label") and missing:
        yield Problem(
            field,
            key,
            f"none of the first {len(labels)} rows of {path} has it",
            "set it to the key that holds the reference answer, or to null for rewards that need none",
        )
    elif config.algorithm.supervised and key is not None and rows.field.startswith("data."):
        wrong = next((row for row in rows.usable if not isinstance(row.label, str) or not row.label), None)
        if wrong is not None:
            yield Problem(
                field,
                key,
                f"algorithm.loss=sft trains text, and row {wrong.row} of {path} has {_kind(wrong.label)} there",
                "set it to the key that holds the reference answer as text, or correct the row",
            )
    elif missing and not _may_score_itself(config) and _reads_label(reward, rows.usable[0]):
        yield Problem(
            field,
            key,
            f"{reward.function} compares with the label, and none of the first {len(labels)} rows of "
            f"{path} has one",
            "set it to the key that holds the reference answer, or take another reward.function",
        )


def _may_score_itself(config: RunConfig) -> bool:
    """Whether a rollout's own code may give it a reward, so that none is called."""
    session = config.rollout.session
    return session is not None and bool(session.function or session.environment or session.named)


def _kind(label: Any) -> str:
    return "no text" if label in (None, "") else f"a {type(label).__name__}"


def _metadata(rows: Rows) -> Iterator[Problem]:
    """Keys of metadata that no row has; a default key may be missing."""
    source, count = rows.source, len(rows.usable)
    absent = f"none of the first {count} rows of {rows.origin} has it"
    remedy = "correct it; a part of a column is dotted, as in extra_info.index"
    extra = {*source.extra_keys, TOOLS, TEMPLATE_KWARGS, SAMPLING}
    for name, key, held in (
        ("tools_key", source.tools_key, TOOLS),
        ("chat_template_kwargs_key", source.chat_template_kwargs_key, TEMPLATE_KWARGS),
        ("sampling_key", source.sampling_key, SAMPLING),
    ):
        if key and not any(row.metadata.get(held) for row in rows.usable):
            yield Problem(f"{rows.field}.{name}", key, absent, "correct it, or set it to null")
    if source.metadata_key not in (None, "metadata") and all(
        row.metadata.keys() <= extra for row in rows.usable
    ):
        yield Problem(f"{rows.field}.metadata_key", source.metadata_key, absent, remedy)
    for key in source.extra_keys:
        if all(key not in row.metadata for row in rows.usable):
            yield Problem(f"{rows.field}.extra_keys", key, absent, remedy)


def unknown_names(
    rows: Rows, unknown: Sequence[tuple[PromptRow, str]], what: str, remedy: str
) -> Iterator[Problem]:
    """Rows whose metadata name something that the configuration does not have, with the reason. what: the kind of name."""
    if unknown:
        row, reason = unknown[0]
        yield Problem(
            rows.place,
            rows.origin,
            f"{len(unknown)} of the first {len(rows.usable)} rows name no {what}; the first is row {row.row}: {reason}",
            remedy,
        )


class _Watched(RewardInput):
    """A sample that records whether its label was read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "label":
            object.__setattr__(self, "label_was_read", True)
        return object.__getattribute__(self, name)


def _reads_label(reward: RewardFunction, row: PromptRow) -> bool:
    """Whether a reward that ships with millrace reads the label; False for a user's reward, which is not called."""
    if reward.group or not reward.function.startswith("millrace.core.rewards."):
        return False
    values: dict[str, Any] = {
        "prompt": row.prompt,
        "response": "",
        "metadata": row.metadata,
        "status": "completed",
    }
    sample = _Watched(
        **{field.name: values[field.name] for field in fields(RewardInput) if field.name in values}
    )
    with contextlib.suppress(MillraceError, ValueError, TypeError, LookupError, AttributeError):
        answer_of(reward_of(reward.function, reward.options), sample)
    return getattr(sample, "label_was_read", False)
