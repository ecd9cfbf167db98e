"""The pictures of rows: read, fitted to the model, and put into the prompt's tokens.

Owns which rows are unusable because of their pictures, and what is held of pictures that were read: an iteration's unused reserve is
drawn again in the next one. Knows neither which rows are drawn nor where pictures are kept.
"""

import hashlib
import threading
from collections import OrderedDict
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
HELD = 256 << 20  # bytes of the files of pictures that are held
LONGEST = 1000  # letters of a path or URL; of longer ones the hash is held
WRITTEN = "bad image: the chat template writes {found} places for {wanted} pictures"


class Seen(NamedTuple):
    """A row with the names of its pictures, and the pictures."""

    row: PromptRow
    pictures: tuple[Picture, ...]


class HeldPictures:
    """The pictures that were read last, by their origin; for several threads."""

    def __init__(self, most: int) -> None:
        """most: bytes of their files."""
        self._most = most
        self._size = 0
        self._held: OrderedDict[tuple[str | None, str], Picture] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str | None, str]) -> Picture | None:
        """A picture, if it is held."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def add(self, key: tuple[str | None, str], picture: Picture) -> None:
        """Hold a picture, and let go of what was asked for longest ago."""
        with self._lock:
            before = self._held.pop(key, None)
            self._held[key] = picture
            self._size += len(picture.png) - (len(before.png) if before else 0)
            while self._size > self._most:
                self._size -= len(self._held.popitem(last=False)[1].png)


class RowPictures:
    """Reads the pictures of rows, for one model."""

    def __init__(self, rules: ImageRules, most: int) -> None:
        """most: tokens of a picture."""
        self.rules = rules
        self._most = most
        self._held = HeldPictures(HELD)

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
        key = _origin(given, base)
        held = self._held.get(key)
        if held is not None:
            return held
        image = decoded(read_given(given, base))
        try:
            size = self.rules.fitted(*image.size, self._most)
        except ImageSizeError as error:
            raise ImageError(f"bad image: {error}") from error
        picture = picture_of(image, size)
        self._held.add(key, picture)
        return picture

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


def _origin(given: Given, base: str | None) -> tuple[str | None, str]:
    """A picture's origin: a short key."""
    if isinstance(given, str) and len(given) <= LONGEST:
        return base, given
    data = given.encode() if isinstance(given, str) else given
    return None, hashlib.sha256(data).hexdigest()


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
