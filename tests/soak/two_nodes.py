"""The Ray cluster that runs of a form with two nodes join: new for each run, so that no kill is of a cluster that an earlier one left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.ray_nodes import RayNodes

CPUS = 2  # of each node


class TwoNodes:
    """A head and a second node on this host."""

    def __init__(self, folder: Path) -> None:
        """folder: where all nodes find weights."""
        self._cluster = RayNodes()
        self._weights = folder / "weights"
        self._weights.mkdir(exist_ok=True)

    def renew(self) -> None:
        """Another cluster at the same address."""
        self._cluster.kill()
        self._cluster.add(CPUS).wait()
        self._cluster.add(CPUS).wait()

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to join."""
        return self._cluster.environment

    @property
    def overrides(self) -> list[str]:
        """What its command line says of the cluster."""
        return [f"placement.ray_address={self._cluster.address}", f"sync.directory={self._weights}"]

    @property
    def pids(self) -> Sequence[int]:
        """The process that holds each node that lives."""
        return [node.pid for node in self._cluster.nodes if node.alive]

    def kill_node(self) -> int:
        """`kill -9` the second node, once there is another one that can take its place; how many nodes died."""
        lost = self._cluster.nodes[1]
        self._cluster.add(CPUS).wait()
        lost.kill()
        return 1

    def close(self) -> None:
        """End all nodes."""
        self._cluster.close()
