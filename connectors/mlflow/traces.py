"""Rollouts as MLflow traces: one call stores the spans of all, another links them to the run.

Owns their form, and ids that are the same whenever a rollout is stored again, so that it replaces itself. A text is an item of a list:
MLflow's page shows a list as JSON, and a text alone as Markdown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.core.plain_text import json_text, whole_values
from millrace.core.tracker import RolloutTrace, TraceSpan

KINDS = {"turn": "LLM", "tool": "TOOL", "reward": "EVALUATOR"}
ROOT = 1
OK, ERROR = "STATUS_CODE_OK", "STATUS_CODE_ERROR"
NS = 1_000_000_000


def trace_id(run: str, sample: str) -> str:
    """The id of a rollout's trace. run: id of its MLflow run."""
    return f"tr-{hashlib.sha256(f'{run}/{sample}'.encode()).hexdigest()[:32]}"


def spans_of(trace: RolloutTrace, run: str, iteration: int, view: str) -> list[dict[str, Any]]:
    """The spans of a trace in MLflow's form, the whole rollout's first. view: how its page in `millrace view` is reached."""
    name = trace_id(run, trace.sample)
    tags = {
        "millrace.sample": trace.sample,
        "millrace.group": trace.group,
        "millrace.iteration": str(iteration),
        "millrace.chosen_as": trace.why,
        "millrace.view": view,
    }
    of_all = TraceSpan(
        f"rollout {trace.sample}",
        "turn",
        trace.inputs,
        trace.outputs,
        min(span.start for span in trace.spans),
        max(span.end for span in trace.spans),
        trace.failed,
    )
    whole = _span(name, ROOT, of_all, "CHAIN")
    whole["attributes"] |= {f"mlflow.traceTag.{tag}": json_text(value) for tag, value in tags.items()}
    return [
        whole,
        *(_span(name, at, span, KINDS[span.kind]) for at, span in enumerate(trace.spans, ROOT + 1)),
    ]


def store_traces(
    client: Any, uri: str, experiment_id: str, run_id: str, traces: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Store traces and link them to a run. Raises MlflowException, NotImplementedError if the store keeps no traces."""
    from mlflow.entities import Span
    from mlflow.tracing.client import TracingClient

    spans = [Span.from_dict(dict(span)) for trace in traces for span in trace]
    TracingClient(uri).log_spans(experiment_id, spans)
    client.link_traces_to_run([str(trace[0]["trace_id"]) for trace in traces], run_id)


def _span(trace: str, number: int, span: TraceSpan, kind: str) -> dict[str, Any]:
    values = {
        "mlflow.traceRequestId": trace,
        "mlflow.spanType": kind,
        "mlflow.spanInputs": _listed(span.inputs),
        "mlflow.spanOutputs": _listed(span.outputs),
    }
    return {
        "trace_id": trace,
        "span_id": f"{number:016x}",
        "parent_span_id": None if number == ROOT else f"{ROOT:016x}",
        "name": span.name,
        "start_time_unix_nano": int(span.start * NS),
        "end_time_unix_nano": int(span.end * NS),
        "events": [],
        "status": {"code": ERROR if span.failed else OK, "message": ""},
        "attributes": {key: json_text(value) for key, value in values.items()},
    }


def _listed(values: Mapping[str, Any]) -> Any:
    return whole_values(
        {
            name: [value] if isinstance(value, str) else value
            for name, value in values.items()
            if value is not None
        }
    )
