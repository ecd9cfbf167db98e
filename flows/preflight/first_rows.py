"""The first rows of a file or a function, as `millrace check` reads them: usable rows, refused rows, texts and lengths.

Imports no torch and no transformers.
"""

from collections import Counter
from typing import Any

from millrace.connectors.huggingface.answer_ends import unseen_by_row
from millrace.connectors.huggingface.tokenizer import is_plain
from millrace.connectors.huggingface.trained_turns import TextSpan
from millrace.connectors.storage.prompts import first_rows
from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.data import Source
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.config.parts.problems import Problem
from millrace.core.contracts.rows.chat_options import SAMPLING
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, far_too_long, refuse, too_long
from millrace.core.errors import ConfigError, MillraceError, MissingColumnError, StorageError
from millrace.core.families.images import image_rules
from millrace.core.families.tokenizer_file import before_text_of
from millrace.flows.preflight.check_model import special_tokens
from millrace.tasks.data.images import RowPictures, Seen
from millrace.tasks.data.own_rows import OwnRows

ROWS, BYTES = 20_000, 8 << 20  # limits of reading a file on a disk
ROWS_FROM_AFAR, BYTES_FROM_AFAR = 1_000, 1 << 20
SEEN = 64  # rows whose pictures are looked at
REMEDIES = {  # by the kind of reason why no row can be used
    "not UTF-8": "save the file as UTF-8; unpack it if it is compressed",
    "not text": "leave these parts out, or write as text what they show",
    "wrong type": "change the column, or name another one in the source",
    "bad image": "correct the pictures that the rows name, or leave such rows out",
    "missing image": "put the pictures beside the data file, or correct their paths",
    "images do not match": "write <image> once for each picture of the row",
    "bad sampling": "correct the column, or set sampling_key to null",
    "too long": "shorten the prompts, or raise data.max_prompt_tokens",
}
ARRAY = "it is one JSON array; write an object a line, as `jq -c '.[]' FILE > FILE.jsonl` does"


class CheckedRows:
    """The first rows of a source, usable and unusable."""

    def __init__(self, field: str, source: PromptRows) -> None:
        self.field = field
        self.source = source
        self.usable: list[PromptRow] = []
        self.refused: list[Quarantined] = []
        self.total = 0  # number of rows of the file, maybe estimated
        self.whole = False  # whether all of them were read
        self.pieces: dict[int, list[TextSpan]] = {}  # pieces of the first trained dialogues, by row
        self.texts: list[str] = []  # texts of the first usable rows, in the form that is sent
        self.lengths: list[int] = []  # tokens of these texts
        self.too_long: list[Quarantined] = []
        self.mark = ""  # the text that stands for a picture
        self.pictured: list[int] = []  # tokens of the pictures of the first usable rows, less one each

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

    def see(self, config: RunConfig, tokenizer: Any) -> list[Problem]:
        """Look at the pictures of the first rows, to which the others are left; refuses rows whose pictures cannot be used."""
        path = config.model.path
        try:
            images = RowPictures(image_rules(path), config.data.max_image_tokens)
            found = images.read(self.source, self.usable[:SEEN])
        except ConfigError as error:
            return [Problem("model.path", path, error.reason, error.remedy)]
        except StorageError as error:
            return [Problem(self.place, self.origin, str(error), error.remedy)]
        self.whole = self.whole and len(self.usable) <= SEEN
        self.refused += [item for item in found if isinstance(item, Quarantined)]
        seen = [item for item in found if isinstance(item, Seen)]
        self.usable = [item.row for item in seen]
        self.pictured = [sum(images.tokens(item.pictures)) - len(item.pictures) for item in seen]
        self.mark = str(tokenizer.id_to_token(images.rules.token) or "") if tokenizer else ""
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
            sum(len(tokenizer.encode(part, add_special_tokens=False).ids) for part in parts) + more + pictured
            for parts, more, pictured in zip(
                pieces or [[text] for text in self.texts],
                added,
                self.pictured or [0] * len(added),
                strict=False,
            )
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
