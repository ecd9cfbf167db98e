"""The pictures of rows: read, fitted to the model, and put into the prompt's tokens.

Owns which rows are unusable because of their pictures. Knows neither which rows are drawn nor where pictures are kept.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from millrace.connectors.storage.images import ImageError, Picture, decoded, picture_of, read_given
from millrace.core.config.data import Source
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.contracts.images import Given
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, refuse
from millrace.core.contracts.source_path import source_path
from millrace.core.families.images import ImageRules, ImageSizeError

THREADS = 4  # a picture that is decoded takes up to 100 MiB
WRITTEN = "bad image: the chat template writes {found} places for {wanted} pictures"


class Seen(NamedTuple):
    """A row with the names of its pictures, and the pictures."""

    row: PromptRow
    pictures: tuple[Picture, ...]


class RowPictures:
    """Reads the pictures of rows, for one model."""

    def __init__(self, rules: ImageRules, most: int) -> None:
        """most: tokens of a picture."""
        self.rules = rules
        self._most = most

    def read(self, source: PromptRows, rows: Sequence[PromptRow]) -> list[Seen | Quarantined]:
        """Each row with its pictures, or the reason why one of them cannot be used. Raises StorageError if storage fails."""
        base = _folder(source)
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda row: self._row(source, row, base), rows))

    def _row(self, source: PromptRows, row: PromptRow, base: str | None) -> Seen | Quarantined:
        if not row.images:
            return Seen(row, ())
        pictures: list[Picture] = []
        for number, given in enumerate(row.images):
            try:
                pictures.append(self._picture(given, base))
            except ImageError as error:
                kind, _, details = str(error).partition(": ")
                return refuse(source, row.row, f"{kind}: number {number}: {details}", str(row.prompt))
        return Seen(row.with_images([picture.name for picture in pictures]), tuple(pictures))

    def _picture(self, given: Given, base: str | None) -> Picture:
        image = decoded(read_given(given, base))
        try:
            size = self.rules.fitted(*image.size, self._most)
        except ImageSizeError as error:
            raise ImageError(f"bad image: {error}") from error
        return picture_of(image, size)

    def tokens(self, pictures: Sequence[Picture]) -> list[int]:
        """Tokens that stand for each picture."""
        return [self.rules.tokens(picture.width, picture.height) for picture in pictures]

    def expanded(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Token ids in which each picture has as many as it takes, of ids with one for each.

        Raises ImageError if the ids have places for other pictures, or name one of a film.
        """
        rules = self.rules
        places = sum(token == rules.token for token in ids)
        if places != len(pictures):
            raise ImageError(WRITTEN.format(found=places, wanted=len(pictures)))
        if rules.film in ids:
            raise ImageError("bad image: the text has the token that stands for a film")
        return rules.expanded(ids, self.tokens(pictures))


def _folder(source: PromptRows) -> str | None:
    """The folder of a source's files, for paths in its rows; None for a function's rows."""
    if isinstance(source, Source) and source.rows:
        return None
    files = source_path(source.path).files
    parts = files.split("/")
    at = next(
        (number for number, part in enumerate(parts) if any(mark in part for mark in "*?[")), len(parts) - 1
    )
    return "/".join(parts[:at]) or ("/" if files.startswith("/") else ".")
