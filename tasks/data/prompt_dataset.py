"""The prompts of a run, tokenised in the driver: small sources once at the start, other sources when rows are drawn.

Owns the length check and the quarantine; knows nothing of which prompts are drawn when.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.storage.prompts import about_rows, fingerprint, read_source
from millrace.connectors.storage.store import Store
from millrace.core.accounts.curriculum import SourcePlan, plan_of
from millrace.core.config import RunConfig
from millrace.core.config.data import Data, Source
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.contracts import schema
from millrace.core.contracts.rows.prompts import Quarantined, SourceFingerprint
from millrace.core.contracts.task_records import FileRecord
from millrace.tasks.data.images import RowPictures
from millrace.tasks.data.rows import (
    DrawnRows,
    Read,
    Rows,
    UsablePrompt,
    tokenised,
    too_many_unusable,
)

log = logging.getLogger(__name__)


@dataclass
class PromptSet:
    """The usable rows of one source, in file order."""

    source: PromptRows
    usable: list[UsablePrompt]
    quarantined: list[Quarantined] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source.name

    def sizes(self) -> dict[int | None, int]:
        """Usable rows; a file has no levels."""
        return {None: len(self.usable)}

    def read(self, level: int | None, numbers: Sequence[int]) -> list[Read]:
        """The usable rows with these numbers."""
        assert level is None, "a file has no levels"
        return [self.usable[number] for number in numbers]

    def fingerprint(self) -> SourceFingerprint:
        """The fingerprint of the source's current content."""
        return fingerprint(self.source, (item.row for item in self.usable), self.quarantined)


class PromptDataset:
    """All training sources of a run."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PromptTokenizer,
        whole: Collection[str] = frozenset(),
        images: RowPictures | None = None,
    ) -> None:
        """whole: sources that are read whole at any size. images: reads pictures; needed if a source has them."""
        self.sources: dict[str, Rows] = {
            source.name: _opened(
                source,
                config.data,
                tokenizer,
                source.name in whole,
                skips_special=config.rollout.sampling.skip_special_tokens,
                images=images,
            )
            for source in config.data.sources
        }
        self._config = config.data

    def read(self, rows: Sequence[tuple[str, int | None, int]]) -> list[Read]:
        """Rows by source, level and number, each usable or with the reason why it is not."""
        wanted: dict[tuple[str, int | None], list[int]] = {}
        for source, level, number in rows:
            wanted.setdefault((source, level), []).append(number)
        found = {
            (source, level, number): item
            for (source, level), numbers in wanted.items()
            for number, item in zip(numbers, self.sources[source].read(level, numbers), strict=True)
        }
        return [found[row] for row in rows]

    def plans(self) -> dict[str, SourcePlan]:
        """The source plans of the ledger."""
        return {
            source.name: plan_of(source, self.sources[source.name].sizes()) for source in self._config.sources
        }

    def quarantined(self) -> dict[str, int]:
        """Unusable rows by source."""
        return {name: len(rows.quarantined) for name, rows in self.sources.items()}

    def fingerprints(self) -> dict[str, SourceFingerprint]:
        """The fingerprint of each source's current content."""
        return {name: rows.fingerprint() for name, rows in self.sources.items()}

    def write_quarantine(self, store: Store) -> FileRecord | None:
        """Keep each unusable row with its reason in quarantine.parquet of the run folder, if there is any."""
        rows = [item.__dict__ for source in self.sources.values() for item in source.quarantined]
        if not rows:
            return None
        table = pa.Table.from_pylist(rows, schema=schema.schema("quarantine"))
        return store.write_table("quarantine.parquet", table, "quarantine").record()


def load_prompts(
    source: PromptRows,
    tokenizer: PromptTokenizer,
    max_tokens: int,
    *,
    skips_special: bool = True,
    images: RowPictures | None = None,
) -> PromptSet:
    """Read and tokenise one source; rows that cannot be used are quarantined with their reason.

    skips_special, images: as of `tokenised`.
    """
    rows, quarantined = read_source(source)
    read = tokenised(source, rows, tokenizer, max_tokens, skips_special=skips_special, images=images)
    usable = [item for item in read if isinstance(item, UsablePrompt)]
    quarantined += [item for item in read if isinstance(item, Quarantined)]
    return PromptSet(source, usable, quarantined)


def _opened(
    source: Source,
    data: Data,
    tokenizer: PromptTokenizer,
    whole: bool,
    *,
    skips_special: bool,
    images: RowPictures | None,
) -> Rows:
    """A training source. Raises DataError if it cannot be read, or too many of its rows are unusable.

    Rows with pictures are read as they are drawn, so that pictures are not all in memory.
    """
    if source.rows or source.images_key or (not whole and about_rows(source) > data.stream_above_rows):
        drawn = DrawnRows(source, data, tokenizer, skips_special=skips_special, images=images)
        _log_unusable(drawn, sum(drawn.sizes().values()))
        return drawn
    prompts = load_prompts(source, tokenizer, data.max_prompt_tokens, skips_special=skips_special)
    bad, total = len(prompts.quarantined), len(prompts.quarantined) + len(prompts.usable)
    _log_unusable(prompts, total)
    if not prompts.usable or bad > data.max_quarantined_share * total:
        raise too_many_unusable(source.name, prompts.quarantined, bad, total, data.max_quarantined_share)
    return prompts


def _log_unusable(rows: Rows, total: int) -> None:
    if rows.quarantined:
        log.warning(
            "source %s: %d of %d rows are unusable; see quarantine.parquet",
            rows.name,
            len(rows.quarantined),
            total,
        )
