"""Checks the configuration of a run with parts on other nodes than its driver.

An address identifies a node. Knows nothing of how parts are made or placed.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.connectors.ray import cluster
from millrace.core.config import RunConfig
from millrace.core.config.engines import LOOPBACK
from millrace.core.config.placement import is_clients
from millrace.core.errors import ConfigError


def check_network(config: RunConfig, addresses: Iterable[str], served: bool = False) -> None:
    """Raise ConfigError if actors on these nodes could not be reached (`served`: they are engines) or given weights."""
    outside = is_clients(config.placement.ray_address)
    here = None if outside else cluster.node_address()
    elsewhere = sorted({address for address in addresses if address != here})
    if not elsewhere:
        return
    here = "outside the Ray cluster" if outside else f"on node {here}"
    where = f"this process is {here}, and parts of the run are on {', '.join(elsewhere)}"
    if served and config.engines.host in LOOPBACK:
        raise ConfigError(
            f"engines.host = {config.engines.host}: {where}, where loopback cannot be reached; set it to 0.0.0.0, in a "
            "network that nobody else is in: keys, prompts and weights cross it unencrypted"
        )
    if config.sync.directory is None:
        raise ConfigError(
            f"sync.directory: {where}, which do not see this host's folders, where weights go by disk and in a replay; name a folder "
            "that every node sees under the same path, or a URL such as s3://bucket/weights"
        )
