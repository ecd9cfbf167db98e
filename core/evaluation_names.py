"""Names of the metrics of held-out sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.core.contracts.task_records import EvaluateRecord, HeldOutRecord
from millrace.core.metric_names import name_part


def evaluation_metrics(record: EvaluateRecord) -> dict[str, float]:
    """Metrics of an evaluation, by name."""
    metrics: dict[str, float] = {"eval/lag": record["lag"]} if "lag" in record else {}
    for path, part in _parts(record["sets"]):
        for figure, value in part.items():
            if isinstance(value, int | float):
                metrics[f"{path}/{figure}"] = value
        metrics |= {f"{path}/pass_at_{k}": value for k, value in part.get("pass_at", {}).items()}
    return metrics


def held_out_metrics(record: HeldOutRecord) -> dict[str, float]:
    """Metrics of held-out losses, by name."""
    metrics: dict[str, float] = {}
    for path, part in _parts(record["sets"]):
        for figure in ("loss", "perplexity", "tokens", "samples"):
            metrics[f"{path}/{figure}"] = part[figure]
    return metrics


def _parts(sets: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each set and each subset, by the prefix of their metrics' names."""
    for name, result in sets.items():
        yield f"eval/{name}", result
        for subset, part in result.get("subsets", {}).items():
            yield f"eval/{name}/{name_part(subset)}", part
