"""The command line of the embedded engine."""

import os
import sys
from pathlib import Path

from millrace.connectors.engines.embedded.access import KEY
from millrace.connectors.engines.launch import EngineStart, Launch
from millrace.core.config import RunConfig
from millrace.core.config.engines import EmbeddedOptions
from millrace.core.errors import ConfigError


def launch_embedded(start: EngineStart) -> Launch:
    """Start the embedded engine on a free port, which it writes to a file."""
    port_file = start.folder / "port"
    command = embedded_command(start.config, start.model, port_file)
    environment = {**os.environ, KEY: start.key}
    return Launch(command, lambda: int(port_file.read_text()) if port_file.exists() else None, environment)


def embedded_command(config: RunConfig, model: str, port_file: Path) -> list[str]:
    """The command. Raises ConfigError if the engine should only prefill."""
    e = config.engines
    assert isinstance(e, EmbeddedOptions)
    if e.prefill:
        raise ConfigError(
            f"engines.prefill = {e.prefill}: without a GPU engines are embedded ones, which do both; set it to 0"
        )
    command = [sys.executable, "-m", "millrace.connectors.engines.embedded", "--model-path", model]
    command += ["--host", e.host, "--port", "0", "--port-file", str(port_file)]
    command += ["--weight-version", "initial", "--dtype", config.dtype]
    command += ["--max-running-requests", str(e.max_running), "--max-total-tokens", str(e.max_total_tokens)]
    if config.adapter_slots:
        command += ["--max-loaded-loras", str(config.adapter_slots)]
    return command + (["--threads", str(e.threads)] if e.threads else [])
