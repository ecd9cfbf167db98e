"""The run `a` on a cluster of Ray nodes: started, held at a point, waited for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.flow_runs import Workplace, output_of, wait_until
from tests.support.ray_nodes import RayNodes


class ClusterRun:
    """The run, with its weights in a folder that all nodes see."""

    def __init__(
        self, place: Workplace, nodes: RayNodes, folder: Path, address: str, *overrides: str
    ) -> None:
        self.place = place
        self.nodes = nodes
        self.root = folder / "runs"
        self.held = folder / "held"
        (folder / "weights").mkdir()
        self.overrides = [
            f"storage.root={self.root}",
            f"placement.ray_address={address}",
            f"sync.directory={folder / 'weights'}",
            "engines.kind=embedded",
            "engines.host=0.0.0.0",
            *overrides,
        ]

    def start(self, *overrides: str, hold: str = "") -> subprocess.Popen[str]:
        stop = {"MILLRACE_KILL_POINT": hold, "MILLRACE_KILL_POINT_FILE": str(self.held)} if hold else {}
        environment = {**self.nodes.environment, **stop}
        return self.place.start("train", "run.yaml", *self.overrides, *overrides, **environment)

    def wait(self, process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
        """Until something holds; fails with what the run printed if it ends before."""
        wait_until(lambda: holds() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]

    def actors(self) -> list[set[int]]:
        """Processes of actors on each node."""
        return [node.actors() for node in self.nodes.nodes]


def ended(process: subprocess.Popen[str], code: int) -> str:
    """What a command printed that ends with this code."""
    out = output_of(process)
    assert process.returncode == code, out
    return out
