"""What `millrace check` cannot check on this host, and says so instead of passing it in silence."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from millrace.connectors.sglang.server_args import PYTHON_PATH, server_args
from millrace.core.config import RunConfig


def unchecked(config: RunConfig) -> Iterator[str]:
    """A sentence for each section of options whose library is not found here."""
    e = config.engines
    if e.sglang and not server_args()[1]:
        yield (
            f"Not checked: {_listed('engines.sglang', e.sglang)}. No SGLang is found on this host; check again where engines "
            f"run, or where {PYTHON_PATH} names its folder."
        )
    options = e.router.options if e.router else {}
    if options and importlib.util.find_spec("sglang_router") is None:
        yield f"Not checked: {_listed('engines.router.options', options)}. No sglang-router is found on this host."


def _listed(section: str, options: dict[str, object]) -> str:
    return ", ".join(f"{section}.{name}" for name in options)
