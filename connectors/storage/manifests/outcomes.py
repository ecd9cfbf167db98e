"""The outcome of each group of an iteration, for its manifest. Owns which columns of the tables it is read from."""

from __future__ import annotations

from typing import Any

from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.store import Store
from millrace.core.accounts.history import GroupOutcome, IterationHistory
from millrace.core.accounts.source_parts import part_name
from millrace.core.errors import CorruptFileError

JOINED = "joined.parquet"  # groups that the iteration before deferred
PLACE = ("row", "epoch", "ordinal")  # columns


def outcomes(folder: Store, index: int, manifest: Manifest) -> IterationHistory:
    """The history of an iteration in its folder, from its prompts and verdicts, which its manifest names."""
    tables = [
        folder.read_table(path, "prompts", entry, [*("group_id", "source", "level"), *PLACE])
        for path in ("prompts.parquet", JOINED)
        if (entry := manifest.find(path))
    ]
    tables[0] = tables[0].sort_by("ordinal")
    prompts = [row for table in tables for row in table.to_pylist()]
    verdicts = folder.read_table(
        "verdicts.parquet",
        "verdicts",
        manifest.file("verdicts.parquet"),
        columns=[
            *("group_id", "verdict", "reason", "train_step", "group_reward", "group_reward_std"),
            *("reused_from", "reused_ordinal"),
        ],
    )
    samples: dict[str, list[dict[str, Any]]] = {}
    reused: dict[int, set[int]] = {}
    for row in verdicts.to_pylist():
        if row["reused_from"] is None:
            samples.setdefault(row["group_id"], []).append(row)
        else:
            reused.setdefault(row["reused_from"], set()).add(row["reused_ordinal"])
    groups = []
    for number, row in enumerate(prompts):
        group = samples.get(row.pop("group_id"))
        row["ordinal"] = number
        row["source"] = part_name(row["source"], row.pop("level"))
        if group is None:
            raise CorruptFileError(
                f"has no verdict on the group of {row}",
                where=folder.url_of("verdicts.parquet"),
                remedy="restore the file",
            )
        kept = [sample for sample in group if sample["verdict"] == "kept"]
        shown = (kept or group)[0]
        steps = sorted({sample["train_step"] for sample in kept})
        groups.append(
            GroupOutcome(
                **row,
                verdict=shown["verdict"],
                reason=shown["reason"],
                steps=steps,
                score=shown["group_reward"],
                std=shown["group_reward_std"],
            )
        )
    return IterationHistory.of(index, groups, reused, joined=sum(table.num_rows for table in tables[1:]))
