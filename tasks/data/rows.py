"""A source that is read row by row as prompts are drawn, and the interface of all sources.

Whether a row is usable is known only when it is drawn. An unusable row is dropped then, with its reason.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from millrace.connectors.huggingface.dialogue import Dialogues, TrainedDialogue
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.storage.images import ImageError, Picture
from millrace.connectors.storage.sources.addressed import AddressedRows
from millrace.core.config.data import Data, Source
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.contracts.failures import Failures
from millrace.core.contracts.rows.chat_options import SAMPLING, chat_options
from millrace.core.contracts.rows.messages import trained_messages, with_system
from millrace.core.contracts.rows.prompts import (
    PromptRow,
    Quarantined,
    SourceFingerprint,
    far_too_long,
    refuse,
    too_long,
    without_label,
)
from millrace.core.errors import DataError
from millrace.tasks.data.images import RowPictures, Seen
from millrace.tasks.data.own_rows import OwnRows

HEAD = 1000  # first rows, which are checked before a run starts
HEAD_WITH_IMAGES = 64
ENOUGH = 100  # rows that must have been read before a share of unusable rows counts


class UsablePrompt(NamedTuple):
    """A row that can be used, and the token ids of its prompt."""

    row: PromptRow
    tokens: list[int]
    dialogue: TrainedDialogue | None = None  # for a row that is a whole dialogue: the tokens after `tokens`
    pictures: tuple[Picture, ...] = ()


Read = UsablePrompt | Quarantined


class Rows(Protocol):
    """A source: rows by number, for each level if it has levels."""

    @property
    def name(self) -> str: ...
    @property
    def quarantined(self) -> Sequence[Quarantined]: ...
    def sizes(self) -> dict[int | None, int]:
        """Rows by level; under None for a source without levels."""
        ...

    def read(self, level: int | None, numbers: Sequence[int]) -> list[Read]:
        """The rows with these numbers."""
        ...

    def fingerprint(self) -> SourceFingerprint:
        """The fingerprint of the source's current content."""
        ...


def tokenised(
    source: PromptRows,
    rows: Sequence[PromptRow],
    tokenizer: PromptTokenizer,
    limit: int,
    *,
    skips_special: bool,
    images: RowPictures | None = None,
) -> list[Read]:
    """Each row with its prompt's tokens; rows of more than `limit` tokens, or with an impossible stop, are unusable.

    skips_special: whether the text of an answer has no special tokens. images: reads pictures; needed if rows may have them.
    """
    refused = {row.row: found for row in rows if (found := far_too_long(row, source, limit))}
    for row in rows:
        if row.row not in refused and (
            unseen := tokenizer.unseen_by_row(row.metadata, skips_special=skips_special)
        ):
            refused[row.row] = refuse(source, row.row, unseen, str(row.metadata[SAMPLING]))
    good = [row for row in rows if row.row not in refused]
    if source.images_key:
        assert images is not None, "a source whose rows have pictures"
        read = iter(_with_pictures(source, good, tokenizer, limit, images))
    else:
        read = iter(_tokenised(source, good, tokenizer, limit))
    return [refused[row.row] if row.row in refused else next(read) for row in rows]


def _with_pictures(
    source: PromptRows, rows: Sequence[PromptRow], tokenizer: PromptTokenizer, limit: int, images: RowPictures
) -> list[Read]:
    seen = images.read(source, rows)
    good = [item for item in seen if isinstance(item, Seen)]
    tokens = iter(_tokenised(source, [item.row for item in good], tokenizer, limit))
    return [
        _expanded(source, item, next(tokens), limit, images) if isinstance(item, Seen) else item
        for item in seen
    ]


def _expanded(source: PromptRows, seen: Seen, read: Read, limit: int, images: RowPictures) -> Read:
    """A row with as many tokens for each picture as it takes."""
    if isinstance(read, Quarantined):
        return read
    try:
        ids = images.expanded(read.tokens, seen.pictures)
    except ImageError as error:
        return refuse(source, seen.row.row, str(error), str(seen.row.prompt))
    if len(ids) > limit:
        return too_long(seen.row, source, len(ids), limit)
    return UsablePrompt(seen.row, ids, pictures=seen.pictures)


def _tokenised(
    source: PromptRows, rows: Sequence[PromptRow], tokenizer: PromptTokenizer, limit: int
) -> list[Read]:
    if source.loss_on != "answer":
        reader = Dialogues(tokenizer, ())
        return [_dialogue(source, row, reader, limit) for row in rows]
    encoded = tokenizer.encode_prompts(
        [row.prompt for row in rows],
        chat=source.chat,
        system=source.system,
        options=[chat_options(source, row.metadata) for row in rows],
    )
    return [
        UsablePrompt(row, ids) if len(ids) <= limit else too_long(row, source, len(ids), limit)
        for row, ids in zip(rows, encoded, strict=True)
    ]


def _dialogue(source: PromptRows, row: PromptRow, reader: Dialogues, limit: int) -> Read:
    """A row that is a whole dialogue, which becomes tokens once."""
    assert not isinstance(row.prompt, str), "rows without messages are refused where they are read"
    messages = with_system(row.prompt, source.system)
    try:
        numbers = trained_messages(messages, source.loss_on)
        dialogue = reader.trained(messages, numbers, chat_options(source, row.metadata))
    except ValueError as error:
        return refuse(source, row.row, str(error), str(row.prompt))
    length = len(dialogue.prompt_tokens) + len(dialogue.tokens)
    if length > limit:
        return too_long(row, source, length, limit)
    return UsablePrompt(row, dialogue.prompt_tokens, dialogue)


class DrawnRows:
    """A source whose rows are read when they are drawn: from large files, or from a user's function."""

    def __init__(
        self,
        source: Source,
        data: Data,
        tokenizer: PromptTokenizer,
        *,
        skips_special: bool,
        images: RowPictures | None = None,
    ) -> None:
        """Reads the first rows. skips_special, images: as of `tokenised`. Raises DataError if too many of them are unusable."""
        self._source, self._data, self._tokenizer = source, data, tokenizer
        self._skips_special, self._images = skips_special, images
        self._rows: AddressedRows | OwnRows = OwnRows(source) if source.rows else AddressedRows(source)
        self._lock = threading.Lock()
        self._seen = self._bad = 0  # rows read so far; a row that is read again counts again
        self._refused: list[Quarantined] = []  # the first unusable rows
        self._labelled = False
        level = source.levels.first if source.levels else None
        head = HEAD_WITH_IMAGES if source.images_key else HEAD
        self._head = self.read(level, range(min(head, self.sizes()[level])))
        self._labelled = any(
            isinstance(item, UsablePrompt) and item.row.label is not None for item in self._head
        )

    @property
    def name(self) -> str:
        """The source's name."""
        return self._source.name

    @property
    def quarantined(self) -> Sequence[Quarantined]:
        """Unusable rows among the first rows; unusable rows that are drawn later are in verdicts.parquet."""
        return self._refused

    def sizes(self) -> dict[int | None, int]:
        """Rows by level."""
        if isinstance(self._rows, OwnRows):
            return self._rows.sizes()
        return {None: len(self._rows)}

    def read(self, level: int | None, numbers: Sequence[int]) -> list[Read]:
        """The rows with these numbers. Raises DataError if too many of all rows read are unusable."""
        rows = self._rows
        items = rows.read(level, numbers) if isinstance(rows, OwnRows) else rows.read(numbers)
        usable = [item for item in items if isinstance(item, PromptRow)]
        read = tokenised(
            self._source,
            usable,
            self._tokenizer,
            self._data.max_prompt_tokens,
            skips_special=self._skips_special,
            images=self._images,
        )
        found = iter(read)
        result: list[Read] = [next(found) if isinstance(item, PromptRow) else item for item in items]
        if self._labelled:
            result = [
                without_label(item.row, self._source)
                if isinstance(item, UsablePrompt) and item.row.label is None
                else item
                for item in result
            ]
        self._count(result)
        return result

    def fingerprint(self) -> SourceFingerprint:
        """The fingerprint of the source's current content; its hash of usable rows covers the first rows."""
        rows, usable = self._rows, [item.row for item in self._head if isinstance(item, UsablePrompt)]
        origin = self._source.rows.function if self._source.rows else self._source.path
        sizes = self.sizes()
        total = sum(sizes.values())
        found = SourceFingerprint.of(origin, rows.size, rows.sha256, total, usable, rows.files)
        levels = {level: count for level, count in sizes.items() if level is not None}
        return found.model_copy(update={"usable": total, "levels": levels, "streamed": True})

    def _count(self, read: Sequence[Read]) -> None:
        with self._lock:
            refused = [item for item in read if isinstance(item, Quarantined)]
            self._seen, self._bad = self._seen + len(read), self._bad + len(refused)
            self._refused += refused[: HEAD - len(self._refused)]
            limit = self._data.max_quarantined_share
            if self._bad and (
                self._bad == self._seen if self._seen < ENOUGH else self._bad > limit * self._seen
            ):
                raise too_many_unusable(self.name, self._refused, self._bad, self._seen, limit)


def too_many_unusable(
    name: str, quarantined: Sequence[Quarantined], bad: int, total: int, limit: float
) -> DataError:
    """The error that stops a run whose source has too few usable rows."""
    if not total:
        return DataError(
            "holds no rows",
            where=f"source {name}",
            remedy="give a file with prompts, or correct the slice at the end of its path",
        )
    unusable = Failures()
    for item in quarantined:
        unusable.add(item.reason, f"row {item.row}: {item.excerpt!r}")
    return DataError(
        f"{bad} of {total} rows are unusable, more than data.max_quarantined_share = {limit:g} allows"
        + (f"; most often: {unusable.most_frequent()}" if quarantined else ""),
        where=f"source {name}",
        remedy="correct the file or the keys of the source, or raise the share; `millrace check` shows each source's rows",
    )
