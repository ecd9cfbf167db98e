"""A Prefect server whose database another process has locked is named while it is waited for."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.flow_runs import Workplace

ASK = """
import logging
from millrace.connectors.prefect.patches import say_when_prefect_is_slow
from prefect.client.orchestration import get_client

logging.basicConfig(level=logging.INFO, format="%(message)s")
say_when_prefect_is_slow()
say_when_prefect_is_slow()
with get_client(sync_client=True) as client:
    client.create_flow_from_name("asked while locked")
print("asked", flush=True)
"""


@pytest.mark.slow
def test_a_locked_database_is_named_while_it_is_waited_for(workplace: Workplace) -> None:
    workplace.call("server", "start")
    environment = workplace.environment | {
        "PREFECT_API_URL": workplace.api,
        "PREFECT_API_AUTH_STRING": workplace.login,
    }
    (database,) = Path(workplace.environment["MILLRACE_HOME"]).glob("**/prefect.db")
    other = sqlite3.connect(database, isolation_level=None, timeout=60)
    other.execute("BEGIN IMMEDIATE")
    with subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as asking:
        assert asking.stdout
        lines: list[str] = []
        for line in asking.stdout:
            lines.append(line)
            if line.startswith("waiting for the Prefect server"):
                other.rollback()
    other.close()
    assert asking.returncode == 0, lines
    assert [line for line in lines if "database may be locked" in line]
    assert "asked\n" in lines
