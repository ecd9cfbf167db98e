"""Parts of samples, read as they land, so that few are left to read when the batch is known and GPUs wait.

Owns which of them stay decoded. Knows nothing of groups.
"""

from __future__ import annotations

import asyncio
import contextlib

import pyarrow as pa

from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, MissingFileError
from millrace.tasks.stream import Stream

KEPT_BYTES = 128 << 20  # bytes of decoded parts; further parts are read when they are needed


class LandedParts:
    """The parts of an iteration's samples."""

    def __init__(self, folder: Store) -> None:
        self._folder = folder
        self._kept: dict[str, pa.Table] = {}

    @property
    def url(self) -> str:
        """The folder of the parts."""
        return self._folder.url_of("rollouts")

    def read(self, path: str, columns: list[str] | None = None) -> pa.Table:
        """A part, or some columns of it. Raises MissingFileError or CorruptFileError, naming file and remedy."""
        kept = self._kept.get(path)
        if kept is None:
            return self._folder.read_table(path, "rollouts", columns=columns)
        return kept.select(columns) if columns else kept

    async def follow(self, stream: Stream) -> None:
        """Read parts as they land, as long as memory allows, until the filter has settled.

        A part that cannot be read raises later, when it is needed.
        """
        seen: set[str] = set()
        room = KEPT_BYTES
        while not stream.settled:
            revision = stream.revision
            for path in [path for path in stream.parts("rollouts") if path not in seen]:
                seen.add(path)
                if room > 0 and not stream.settled:
                    with contextlib.suppress(CorruptFileError, MissingFileError):
                        self._kept[path] = await asyncio.to_thread(self.read, path)
                        room -= self._kept[path].nbytes
            await stream.wait(revision)

    def forget(self) -> None:
        """Free the decoded parts: the batch is written."""
        self._kept.clear()
