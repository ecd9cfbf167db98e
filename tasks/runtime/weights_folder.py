"""The folder through which weights go from trainer to engines, shared or in storage (sync.directory).

Owns its place, the version in it, and that nothing else stays in it: no older version, and no files of a dead driver. Knows
nothing of engines.
"""

import asyncio
import logging
import os
import uuid

from millrace.connectors.host.own_folders import own_folder, remove_own_folder
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.rank import Rank
from millrace.core.config import RunConfig
from millrace.core.errors import StorageError
from millrace.core.families.served_files import ALONE
from millrace.tasks.runtime.trainer import Ranks

log = logging.getLogger(__name__)


class WeightsFolder:
    """One driver's folder, with one version of the weights."""

    def __init__(self, config: RunConfig, identity: str) -> None:
        """Raises StorageError if it cannot be made, or if files of the run's dead drivers cannot be removed."""
        self.version: int | None = None
        self._by_url = config.sync.by_url
        self._merged = not config.adapters_by_name
        self._removal: asyncio.Task[None] | None = None
        if self._by_url:
            # within the run's folder, whose lease keeps other drivers out
            mine = Store(config.sync.directory or "").child(f"millrace-{identity}")
            mine.remove("", recursive=True)
            self._store = mine.child(uuid.uuid4().hex)
        else:
            where = os.path.abspath(config.sync.directory) if config.sync.directory else None
            self._store = Store(own_folder(f"millrace-{identity}", where))

    @property
    def url(self) -> str:
        """Path or URL of the Hugging Face folder with the version held."""
        return self._store.url_of(_name(self.version))

    async def write(self, ranks: Ranks, version: int) -> None:
        """Let the ranks write a version. The others are removed while engines load it."""
        await self._removed()
        place = self._store.url_of(_name(version))
        if self._by_url:
            await ranks.each(Rank.upload, place, version, ALONE, self._merged)
        else:
            await ranks.each(Rank.export, place, version, self._merged)
        self.version = version
        self._removal = asyncio.create_task(asyncio.to_thread(self._remove_others))

    async def _removed(self) -> None:
        """Wait until no older version is there. Raises StorageError if one cannot be removed."""
        if self._removal is not None:
            removal, self._removal = self._removal, None
            await removal

    def _remove_others(self) -> None:
        for name in self._store.folders():
            if name != _name(self.version):
                self._store.remove(name, recursive=True)

    async def close(self) -> None:
        """Remove the folder."""
        try:
            await self._removed()
        finally:
            await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if not self._by_url:
            remove_own_folder(self._store.root)
            return
        try:
            self._store.remove("", recursive=True)
        except StorageError as error:
            log.warning("weights are left behind: %s", error)


def _name(version: int | None) -> str:
    assert version is not None
    return f"weights-{version:08d}"
