"""The local MLflow server: one of a home, behind a login, over the store that was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from millrace.connectors.host.local_server import POLICY, listening
from millrace.connectors.mlflow.server import ensure_mlflow, local_page, stop_mlflow
from millrace.connectors.mlflow.tracker import KIND, KIND_TAG, MlflowTracker, find_page
from millrace.core.errors import MillraceError
from tests.support.flow_runs import basic

LOGIN = "millrace:secret"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home"
    stop_mlflow()


def status(url: str, headers: dict[str, str]) -> int:
    try:
        with urlopen(Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_a_home_has_one_server_which_asks_for_the_login_and_shows_the_store(home: Path) -> None:
    assert local_page() == "http://127.0.0.1:5000"
    tracker = MlflowTracker.start("sqlite:///curves.db", "e", "a", "/runs/a", "a", None)
    page = ensure_mlflow("sqlite:///curves.db", LOGIN)
    assert page == ensure_mlflow("sqlite:///curves.db", LOGIN) == local_page()
    record = json.loads((home / "mlflow-server.json").read_text())
    assert record["serves"] == f"sqlite:///{Path.cwd() / 'curves.db'}"
    assert not [path for path in (home, *home.rglob("*")) if path.stat().st_mode & 0o077]
    process = psutil.Process(record["pid"])
    assert "secret" not in " ".join(process.cmdline())
    assert {item.laddr.ip for item in process.net_connections() if item.status == "LISTEN"} == {"127.0.0.1"}
    query = f"{page}/api/2.0/mlflow/runs/get?run_id={tracker.run_id}"
    for url in (page, query, f"{page}/static-files/index.html"):
        assert status(url, {}) == status(url, basic("millrace:other")) == 401
    assert status(page, basic(LOGIN)) == status(query, basic(LOGIN)) == 200
    assert status(query, {**basic(LOGIN), "Host": "example.org"}) == 403
    with urlopen(Request(page, headers=basic(LOGIN)), timeout=60) as answer:
        assert answer.headers["Content-Security-Policy"] == POLICY
    assistant = f"{page}/ajax-api/3.0/mlflow/assistant/config"
    assert (status(assistant, {}), status(assistant, basic(LOGIN))) == (401, 404)
    listed = f"{page}/#/experiments/{tracker.experiment_id}/runs"
    assert find_page("sqlite:///curves.db").partition("?")[0] == listed
    assert find_page("sqlite:///curves.db", tracker.run_id) == tracker.url()
    assert tracker.url().startswith(f"{listed}/{tracker.run_id}/")
    with pytest.raises(MillraceError, match=r"tracking\.uri"):
        find_page("sqlite:///curves.db", "0" * 32)
    assert stop_mlflow()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert not stop_mlflow()


@pytest.mark.slow
def test_another_store_or_port_ends_the_server_before_it(home: Path) -> None:
    first = ensure_mlflow("sqlite:///one.db", LOGIN)
    process = psutil.Process(json.loads((home / "mlflow-server.json").read_text())["pid"])
    second = ensure_mlflow("sqlite:///two.db", LOGIN)
    assert second == first
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    with listening(0) as free:  # type: ignore[union-attr]
        port = free.getsockname()[1]
        with pytest.raises(
            MillraceError, match=rf"{port}: another program has taken it; give another --port"
        ):
            ensure_mlflow("sqlite:///two.db", LOGIN, port)
    assert ensure_mlflow("sqlite:///two.db", LOGIN, port) == f"http://127.0.0.1:{port}"


def test_an_experiment_is_one_for_training_also_where_an_earlier_release_made_it(home: Path) -> None:
    client = MlflowTracker.start("sqlite:///curves.db", "new", "a", "/runs/a", "a", None)._client
    client.create_experiment("old")
    client.create_experiment("chosen", tags={KIND_TAG: "genai_development"})
    for name in ("old", "chosen"):
        MlflowTracker.start("sqlite:///curves.db", name, "a", "/runs/a", "a", None)
    kinds = {name: client.get_experiment_by_name(name).tags[KIND_TAG] for name in ("new", "old", "chosen")}
    assert kinds == {"new": KIND, "old": KIND, "chosen": "genai_development"}
