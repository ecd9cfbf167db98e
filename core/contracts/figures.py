"""The names under which figures of held-out sets stand in metrics."""

from __future__ import annotations

from millrace.core.contracts.task_records import EvaluateRecord, HeldOutRecord
from millrace.core.metric_names import name_part


def evaluation_metrics(record: EvaluateRecord) -> dict[str, float]:
    """Metrics of an evaluation, by name."""
    metrics: dict[str, float] = {"eval/lag": record["lag"]} if "lag" in record else {}
    for name, result in record["sets"].items():
        parts = {
            name: result,
            **{f"{name}/{name_part(subset)}": part for subset, part in result.get("subsets", {}).items()},
        }
        for path, part in parts.items():
            for figure, value in part.items():
                if isinstance(value, int | float):
                    metrics[f"eval/{path}/{figure}"] = value
            metrics |= {f"eval/{path}/pass_at_{k}": value for k, value in part.get("pass_at", {}).items()}
    return metrics


def held_out_metrics(record: HeldOutRecord) -> dict[str, float]:
    """Metrics of held-out losses, by name."""
    metrics: dict[str, float] = {}
    for name, result in record["sets"].items():
        for path, part in (
            (name, result),
            *((f"{name}/{name_part(key)}", each) for key, each in result.get("subsets", {}).items()),
        ):
            for figure in ("loss", "perplexity", "tokens", "samples"):
                metrics[f"eval/{path}/{figure}"] = part[figure]
    return metrics
