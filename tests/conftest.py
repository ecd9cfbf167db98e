"""An S3 API server, how long a test may take, which modules it leaves, which files share a process, and that Ctrl-C ends what it starts."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Generator, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ctrl_c import heed_ctrl_c
from tests.support.s3_server import BUCKET, s3_server

# fixtures by folder, of processes that take seconds to start, and a part of a core while they wait
SHARED = {
    "engine_contract": ("on", "engine"),  # an embedded engine
    "flows": ("workplace", "whole"),  # a Prefect server, a Ray head and an undisturbed run
    "golden": ("workers",),  # as megatron
    "megatron": ("workers",),  # the process that trainer ranks are forked from
    "rank_contract": ("trainer",),  # as megatron
    "ray": ("ray_home", "joined", "head_folder"),  # a Ray head
    "sglang": ("make_fleet", "routers", "handles"),  # two embedded engines and their routers
    "sglang_protocol": ("http", "served"),  # an embedded engine
}
AS_MEGATRON = ("golden", "rank_contract")  # folders whose ranks are forked from the same process
WHOLE_RUNS_S = 3600  # slow tests wait with patience of their own, which lasts longer on a busy machine


def pytest_configure() -> None:
    """Tests press Ctrl-C in commands that they start, also where pytest was started in the background."""
    heed_ctrl_c()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay together, and so do all of a folder that use the same servers: these are started once."""
    from xdist.scheduler.loadfile import LoadFileScheduling

    class OneOfEachServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return shared_servers(config.rootpath / file) or file

    if config.getoption("dist") != "loadfile" or config.getoption("part_of", None):
        return None  # the order of files is a commit's
    return OneOfEachServer(config, log)


@cache
def shared_servers(file: Path) -> str | None:
    """The folder of a file whose tests use what the folder's tests share; None for other files."""
    folder = file.parent.name
    names = "|".join(SHARED.get(folder, ()))
    used = rf'\b({names}): |usefixtures\("({names})"'
    if not names or not re.search(used, file.read_text()):
        return None
    return "megatron" if folder in AS_MEGATRON else folder


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Servers end with their folder's tests: those that wait for the end of the session take a part of a core.

    A commit's part of the slow tests comes back to a folder, and would start them again.
    """
    folder = item.path.parent
    stays = nextitem is not None and nextitem.path.parent == folder
    if folder.name not in SHARED or stays or item.config.getoption("part_of", None):
        return
    request: Any = getattr(item, "_request")  # noqa: B009 - pytest has no other way to end a fixture early
    for name in SHARED[folder.name]:
        for fixture in request._fixturemanager.getfixturedefs(name, item) or ():
            fixture.finish(request)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: looking through it for garbage, again and again, would take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test is not ended by the time that is enough for others."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(WHOLE_RUNS_S))


@pytest.fixture(scope="session", autouse=True)
def no_waits_for_a_disk() -> Iterator[None]:
    """What tests write need not survive a loss of power. Processes that they start still wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test's own modules and the folders in which they are found end with it: others have modules of the same names."""
    places, newest, written = list(sys.path), next(reversed(sys.modules)), tmp_path_factory.getbasetemp()
    yield
    sys.path[:] = places
    # in the order of their imports: there are thousands, which a copy before each test would go through
    for name in list(takewhile(lambda name: name != newest, reversed(sys.modules))):
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
