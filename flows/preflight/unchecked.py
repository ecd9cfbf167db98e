"""Lines beside the plan of `millrace check`: what it cannot check on this host, and modules that hide others."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from millrace.connectors.engines.sglang.server_args import PYTHON_PATH, server_args
from millrace.core.config import RunConfig
from millrace.flows.preflight.check_hooks import hidden_modules


def unchecked(config: RunConfig, whole: bool = True) -> Iterator[str]:
    """A sentence for each section of options whose library is not found here, and for each function found in two places.

    whole: whether the model's weights are on this host.
    """
    yield from hidden_modules(config)
    if not whole:
        yield f"Not checked: the weights of {config.model.path}, which train downloads into Hugging Face's cache."
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
