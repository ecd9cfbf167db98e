"""An error of a run is logged once: without a traceback if it is one for people to read, with one if it is a bug."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from tests.support.flow_runs import PATIENCE_S, Workplace
from tests.support.slow_members import slow_but

RUNS = """
import asyncio, sys
from millrace.connectors.prefect.server import ensure_server
from millrace.core.errors import DataError

ensure_server()
from prefect import flow, task
from millrace.connectors.prefect.run_errors import log_errors_once
from millrace.flows.commands.terminal import guarded

ERRORS = {"mistake": DataError("holds no rows", where="sums.jsonl", remedy="give one with rows"), "bug": KeyError("a bug")}

@task(name="filter")
async def fails(kind):
    raise ERRORS[kind]

@flow(name="iteration_that_fails")
async def iteration(kind):
    async with asyncio.TaskGroup() as group:
        group.create_task(fails(kind))
        group.create_task(asyncio.sleep(60))

@flow(name="train_that_fails", flow_run_name="{name}")
async def train(name, kind):
    try:
        await iteration(kind)
    except* Exception as group:
        error = group.exceptions[0]
    raise error

kind, by_command = sys.argv[1], sys.argv[2] == "command"
log_errors_once(by_command=by_command)
run = lambda: asyncio.run(train(f"{kind}-under-a-{sys.argv[2]}", kind))
if by_command:
    guarded(run)
try:
    run()
except Exception:
    sys.exit(1)
"""
MESSAGE = "DataError: sums.jsonl: holds no rows; give one with rows"


@pytest.mark.parametrize(
    ("kind", "under"),
    slow_but(product(["mistake", "bug"], ["command", "worker"]), ("mistake", "worker"), ("bug", "command")),
)
def test_an_error_is_told_once_on_the_terminal_and_once_in_the_log_of_each_flow_run(
    workplace: Workplace, kind: str, under: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUNS, kind, under],
        env=workplace.environment,
        cwd=workplace.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == (2 if (kind, under) == ("mistake", "command") else 1)
    assert done.stdout == ""
    said = done.stderr
    assert said.count(MESSAGE) == (kind == "mistake"), said
    assert said.count("Traceback") == (kind == "bug"), said
    assert said.count("KeyError: 'a bug'") == (kind == "bug"), said
    assert "Finished in state" not in said
    name = f"{kind}-under-a-{under}"
    (run,) = workplace.ask("/flow_runs/filter", {"flow_runs": {"name": {"any_": [name]}}})
    logs = workplace.ask("/logs/filter", {"logs": {"flow_run_id": {"any_": [run["id"]]}}})
    told = [entry["message"] for entry in logs if entry["level"] >= 40]
    assert len(told) == 1, told
    assert ("Traceback" in told[0]) == (kind == "bug")
    assert MESSAGE in told[0] or kind == "bug"
    assert "holds no rows; give one with rows" in run["state"]["message"] or kind == "bug"
