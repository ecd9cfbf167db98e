"""The lease: one driver at a time, whatever races, clocks, namespaces and hands do to it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.host.process_identity import ProcessIdentity
from millrace.connectors.storage.files import Files
from millrace.connectors.storage.lease import Lease, find_driver
from millrace.connectors.storage.store import Store
from millrace.core.errors import CorruptFileError, LeaseHeldError

RACERS, ROUNDS = 25, 25
RACE = Path(__file__).parents[2] / "support" / "lease_race.py"
FIRST = "lease/000001.json"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_LEASE_S", "0.6")


@pytest.mark.parametrize(
    ("root", "processes", "rounds"),
    [
        ("path", RACERS, ROUNDS),
        pytest.param("s3", 5, ROUNDS, marks=pytest.mark.slow),  # processes of five threads
    ],
    indirect=["root"],
)
def test_of_processes_that_take_it_at_once_one_holds_it(root: str, processes: int, rounds: int) -> None:
    command = [sys.executable, str(RACE), root, str(processes), str(RACERS // processes), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[token] for token in range(1, rounds + 1)]


def test_a_driver_that_lives_refuses_another_and_one_that_released_does_not(root: str) -> None:
    first = Lease.take(Store(root))
    with pytest.raises(LeaseHeldError, match=f"driven by process {os.getpid()} on "):
        Lease.take(Store(root))
    first.renew()
    first.release()
    second = Lease.take(Store(root))
    assert (first.token, second.token) == (1, 2)
    for use in (first.check, first.renew):
        with pytest.raises(LeaseHeldError, match=r"taken over by process \d+"):
            use()
    first.release()
    second.check()


def test_one_folder_has_one_driver_by_whatever_path_it_is_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once: a holder that is known to live is not watched for a sign of life."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    roots = ["there", "link", "there/.", "link/../there", "./link"]
    lease = Lease.take(Store(str(tmp_path / roots[0])).child("a"))
    for root in roots:
        with pytest.raises(LeaseHeldError, match=f"driven by process {os.getpid()} on "):
            Lease.take(Store(f"{tmp_path}/{root}").child("a"))
        assert find_driver(Store(f"{tmp_path}/{root}").child("a")) == ProcessIdentity.own()
    assert "for a sign of its life" not in caplog.text
    lease.release()
    assert Lease.take(Store(str(tmp_path / "link")).child("a")).token == 2


def change(store: Store, path: str = FIRST, **values: Any) -> None:
    store.write_json(path, {**store.read_json(path), **values})


def elsewhere(store: Store, **values: Any) -> None:
    """Let the holder be a process of another boot, of which this one cannot know whether it lives."""
    process = {**store.read_json(FIRST)["process"], "boot": "another", **values}
    change(store, process=process)


def test_a_dead_process_of_this_host_is_replaced_at_once(tmp_path: Path) -> None:
    code = f"from tests.connectors.storage.test_lease import *; Lease.take(Store({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
    started = time.monotonic()
    assert Lease.take(Store(str(tmp_path))).token == 2
    assert time.monotonic() - started < 0.5


FOREIGN: dict[str, Callable[[Store], None]] = {
    "another boot": elsewhere,
    "another pid namespace, the same host and pid": lambda store: change(
        store, process={**store.read_json(FIRST)["process"], "namespaces": "pid:[1]"}
    ),
    "a copied run folder": lambda store: change(store, folder="/the/original"),
}


@pytest.mark.parametrize("make_foreign", FOREIGN.values(), ids=FOREIGN)
def test_a_holder_elsewhere_keeps_it_while_it_renews(
    root: str, make_foreign: Callable[[Store], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(root)
    Lease.take(store)
    make_foreign(store)
    ended = threading.Event()

    def renew() -> None:
        number = 0
        while not ended.wait(0.1):
            number += 1
            change(store, renewals=number)

    holder = threading.Thread(target=renew)
    holder.start()
    with pytest.raises(LeaseHeldError, match="driven by process"):
        Lease.take(store)
    ended.set()
    holder.join()
    with caplog.at_level(logging.WARNING):
        assert Lease.take(store).token == 2
    assert "waiting 1 s for a sign of its life" in caplog.text
    assert "no sign of life" in caplog.text


@pytest.mark.parametrize("skew", [-600, 600])
def test_clocks_decide_nothing(tmp_path: Path, skew: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = Store(str(tmp_path)), time.time
    monkeypatch.setattr(time, "time", lambda: now() + skew)
    lease = Lease.take(store)
    lease.renew()
    monkeypatch.setattr(time, "time", now)
    for foreign in (False, True):
        if foreign:
            elsewhere(store)
            threading.Timer(0.2, change, [store], {"renewals": 9}).start()
        with pytest.raises(LeaseHeldError):
            Lease.take(store)
    assert Lease.take(store).token == 2


def test_a_driver_in_another_pid_namespace_of_one_host_name_is_seen_alive(tmp_path: Path) -> None:
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no PID namespaces here: {error}")
    code = (
        "import sys, time; from millrace.connectors.storage.lease import *; lease = Lease.take(Store(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "while True: time.sleep(0.1); lease.renew()"
    )
    holder = subprocess.Popen(
        [*unshare, sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    try:
        process = ProcessIdentity.model_validate(Store(str(tmp_path)).read_json(FIRST)["process"])
        own = ProcessIdentity.own()
        assert (process.host, process.boot) == (own.host, own.boot)
        assert process.lives() is None
        with pytest.raises(LeaseHeldError):
            Lease.take(Store(str(tmp_path)))
    finally:
        holder.kill()
        holder.communicate()
    assert Lease.take(Store(str(tmp_path))).token == 2


def test_a_pid_that_another_process_has_now_is_a_dead_holder() -> None:
    own = ProcessIdentity.own()
    assert own.lives() is True
    assert own.model_copy(update={"started": own.started - 1}).lives() is False
    child = subprocess.Popen(["true"])
    while (
        Path(f"/proc/{child.pid}/stat").exists() and " Z " not in Path(f"/proc/{child.pid}/stat").read_text()
    ):
        time.sleep(0.01)
    assert own.model_copy(update={"pid": child.pid}).lives() is False  # ended, and not waited for
    child.wait()
    assert own.model_copy(update={"pid": child.pid}).lives() is False


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"token": 1, "own', b"null", b"\xff", b"[" * 20000])
def test_a_broken_lease_is_named_and_its_remedy_works(root: str, content: bytes) -> None:
    store = Store(root)
    store.write(FIRST, content)
    with pytest.raises(
        CorruptFileError, match=f"{FIRST}: is not a lease; make sure .* then remove this file"
    ):
        Lease.take(store)
    store.remove(FIRST)
    assert Lease.take(store).token == 1


def test_a_holder_repairs_its_own_file_and_stops_where_it_is_gone(root: str) -> None:
    store = Store(root)
    lease = Lease.take(store)
    store.write(FIRST, b"{}")
    lease.renew()
    with pytest.raises(LeaseHeldError, match="driven by"):
        Lease.take(store)
    store.remove(FIRST)
    for use in (lease.check, lease.renew):
        with pytest.raises(LeaseHeldError, match="the lease of this driver was removed"):
            use()


def test_a_store_without_conditional_writes_is_found_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from millrace.connectors.storage import lease as leases

    monkeypatch.setattr(leases, "SETTLE_S", 0.2)
    monkeypatch.setattr(Files, "creates_once", False)
    assert Lease.take(Store(str(tmp_path))).token == 1
    assert "this store cannot create a file only once" in caplog.text


def test_who_drives_a_run_is_found_while_it_lives(root: str) -> None:
    store = Store(root)
    assert find_driver(store) is None
    lease = Lease.take(store)
    assert find_driver(store) == ProcessIdentity.own()
    elsewhere(store)
    assert find_driver(store) is None  # no renewal while this process watched
    lease.release()
    assert find_driver(store) is None


def test_a_driver_elsewhere_that_renews_is_found_too(tmp_path: Path) -> None:
    store, ended = Store(str(tmp_path)), threading.Event()
    Lease.take(store)
    elsewhere(store)

    def renew() -> None:
        while not ended.wait(0.05):
            change(store, renewals=store.read_json(FIRST)["renewals"] + 1)

    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        found = find_driver(store)
    finally:
        ended.set()
        renewing.join()
    assert found is not None
    assert (found.boot, found.lives()) == ("another", None)
