"""An S3 API server, how long a test may take, which modules it leaves, which tests share a process, and that Ctrl-C ends what it starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.ctrl_c import heed_ctrl_c
from tests.support.s3_server import BUCKET, s3_server

WHOLE_RUNS_S = 3600  # slow tests wait with patience of their own, which lasts longer on a busy machine


def pytest_configure() -> None:
    """Tests press Ctrl-C in commands that they start, also where pytest was started in the background."""
    heed_ctrl_c()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay together, and so do all that use the workplace: one Prefect server and one undisturbed run serve them."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class OneWorkplace(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "the workplace" if uses_workplace(config.rootpath / file) else file

    of_a_commit = config.getoption("part_of", None)  # whose order of files holds
    return OneWorkplace(config, log) if config.getoption("dist") == "loadfile" and not of_a_commit else None


@cache
def uses_workplace(file: Path) -> bool:
    return file.parent.name == "flows" and bool(re.search(r"\b(workplace|whole): ", file.read_text()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test is not ended by the time that is enough for others."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_RUNS_S))


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test's own modules and the folders in which they are found end with it: others have modules of the same names."""
    places, known, written = list(sys.path), set(sys.modules), tmp_path_factory.getbasetemp()
    yield
    sys.path[:] = places
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(written):
            del sys.modules[name]


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """URL of a bucket; endpoint and credentials stand in the environment, as a user gives them."""
    with s3_server() as variables, pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        yield f"s3://{BUCKET}"
