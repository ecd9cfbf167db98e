"""Rules of `tracking`."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """A tracker that is named twice, and a URI that MLflow would not take or does not get."""
    trackers = config.tracking.trackers
    if len(set(trackers)) < len(trackers):
        yield Problem("tracking.trackers", trackers, "it names one twice", "name each once")
    if config.tracking.uri is not None:
        yield from _tracking(config.tracking.uri)
        if "mlflow" not in trackers:
            yield Problem(
                "tracking.uri",
                config.tracking.uri,
                "it is MLflow's, which is not among tracking.trackers",
                "add mlflow there, or leave it out",
            )


def _tracking(uri: str) -> Iterator[Problem]:
    known = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
    head, found, rest = uri.partition("://")
    if not uri.strip():
        yield Problem(
            "tracking.uri", uri, "it is empty", "leave it out for a SQLite file, or give http://host:port"
        )
    elif not found and uri != "databricks":
        yield Problem(
            "tracking.uri",
            uri,
            "not a URI",
            "write sqlite:///path/of/file.db or http://host:port, or leave it out",
        )
    elif found and head.partition("+")[0] not in known:
        yield Problem("tracking.uri", uri, f"MLflow knows no {head}://", f"use one of {', '.join(known)}")
    elif head == "sqlite" and (not rest.startswith("/") or not rest.strip("/")):
        yield Problem("tracking.uri", uri, "it names no file", "write sqlite:///path/of/file.db")
    elif head in ("http", "https") and not _host(uri):
        yield Problem("tracking.uri", uri, "it names no host", "write http://host:port")


def _host(uri: str) -> str | None:
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname
