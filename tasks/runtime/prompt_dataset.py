"""The usable prompts of a run, tokenised once in the process that drives it.

Owns reading sources, the length check and the quarantine; knows nothing of which prompts are drawn when.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pyarrow as pa

from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.storage.prompts import fingerprint, read_source
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.config.data import Source
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts import schema
from millrace.core.contracts.chat_options import chat_options
from millrace.core.contracts.failures import Failures
from millrace.core.contracts.prompts import PromptRow, Quarantined, SourceFingerprint
from millrace.core.contracts.task_records import FileRecord
from millrace.core.errors import DataError

log = logging.getLogger(__name__)


@dataclass
class PromptSet:
    """The usable rows of one source, in file order, and their prompt tokens."""

    name: str
    rows: list[PromptRow]
    tokens: list[list[int]]
    quarantined: list[Quarantined] = field(default_factory=list)

    def tokens_of(self, number: int) -> list[int]:
        """Prompt token ids of a row."""
        return self.tokens[number]


class PromptDataset:
    """All training sources of a run."""

    def __init__(self, config: RunConfig, tokenizer: PromptTokenizer) -> None:
        self._sources = config.data.sources
        self.sets = {
            source.name: load_prompts(source, tokenizer, config.data.max_prompt_tokens)
            for source in config.data.sources
        }
        for prompts in self.sets.values():
            _check_quarantine(prompts, config.data.max_quarantined_share)

    def row(self, source: str, number: int) -> PromptRow:
        """A usable row by its number within the source."""
        return self.sets[source].rows[number]

    def tokens(self, source: str, number: int) -> list[int]:
        """Prompt token ids of a row."""
        return self.sets[source].tokens[number]

    def sizes(self) -> dict[str, int]:
        """Usable rows by source."""
        return {name: len(prompts.rows) for name, prompts in self.sets.items()}

    def quarantined(self) -> dict[str, int]:
        """Unusable rows by source."""
        return {name: len(prompts.quarantined) for name, prompts in self.sets.items()}

    def fingerprints(self) -> dict[str, SourceFingerprint]:
        """What each source holds now."""
        return {
            source.name: fingerprint(source, self.sets[source.name].rows, self.sets[source.name].quarantined)
            for source in self._sources
        }

    def write_quarantine(self, store: Store) -> FileRecord | None:
        """Keep each unusable row with its reason in quarantine.parquet of the run folder, if there is any."""
        rows = [item.__dict__ for prompts in self.sets.values() for item in prompts.quarantined]
        if not rows:
            return None
        table = pa.Table.from_pylist(rows, schema=schema.schema("quarantine"))
        return store.write_table("quarantine.parquet", table, "quarantine").record()


def load_prompts(source: Source | EvalSet, tokenizer: PromptTokenizer, max_tokens: int) -> PromptSet:
    """Read and tokenise one source; rows that cannot be used are quarantined with their reason."""
    rows, quarantined = read_source(source)
    tokens = tokenizer.encode_prompts(
        [row.prompt for row in rows],
        chat=source.chat,
        system=source.system,
        options=[chat_options(source, row.metadata) for row in rows],
    )
    usable: list[PromptRow] = []
    kept: list[list[int]] = []
    for row, ids in zip(rows, tokens, strict=True):
        if len(ids) > max_tokens:
            reason = f"too long: {len(ids)} tokens, data.max_prompt_tokens is {max_tokens}"
            quarantined.append(Quarantined(source.name, row.row, reason, str(row.prompt)[:80]))
        else:
            usable.append(row)
            kept.append(ids)
    return PromptSet(source.name, usable, kept, quarantined)


def _check_quarantine(prompts: PromptSet, limit: float) -> None:
    bad, total = len(prompts.quarantined), len(prompts.quarantined) + len(prompts.rows)
    if bad:
        log.warning("source %s: %d of %d rows are unusable; see quarantine.parquet", prompts.name, bad, total)
    if not prompts.rows or bad > limit * total:
        unusable = Failures()
        for item in prompts.quarantined:
            unusable.add(item.reason, f"row {item.row}: {item.excerpt!r}")
        raise DataError(
            f"{bad} of {total} rows are unusable, more than data.max_quarantined_share = {limit:g} allows"
            + (f"; most often: {unusable.most_frequent()}" if bad else ""),
            where=f"source {prompts.name}",
            remedy="correct the file or the keys of the source, or raise the share; `millrace check` shows each source's rows",
        )
