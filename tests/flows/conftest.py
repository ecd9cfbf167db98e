"""One Prefect server, one Ray head and one random model for all flow tests; runs are started by the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.deployed import Deployed
from tests.support.flow_runs import Workplace, configuration, make_workplace
from tests.support.mistakes import make_wrong_place

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wrong_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good configuration, run.yaml, and all files, good and bad, that it and wrong ones name."""
    return make_wrong_place(tmp_path_factory.mktemp("check"))


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("workplace"))
    place.call("server", "start")
    yield place
    place.close()


@pytest.fixture(scope="session")
def whole(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run `a`, never interrupted, with a trace of its second iteration."""
    root = tmp_path_factory.mktemp("whole")
    out = workplace.train(root, "tracking.trace=2")
    assert "3 iterations complete, 3 of them now" in out
    said = out.partition("of them now\n")[2].splitlines()
    assert [line.split()[0] for line in said] == ["export", "best", "look", "curves"]
    assert said[0].split()[1] == f"{root}/a/exports/000003"
    return root / "a"


@pytest.fixture(scope="module")
def deployed(workplace: Workplace) -> Iterator[Deployed]:
    """A worker for the deployments of this checkout."""
    here = Deployed(workplace.api, workplace.login, workplace.environment, REPOSITORY)
    here.prefect("work-pool", "create", "local", "--type", "process", "--overwrite")
    here.prefect("deploy", "--all")
    here.start_worker(workplace.folder / "worker.log")
    yield here
    here.close()


@pytest.fixture(scope="module")
def project(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user's with the file of the run `a`, and what it names."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("model", "train.jsonl", "held_out.jsonl"):
        (folder / name).symlink_to(workplace.folder / name)
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration()))
    return folder


@pytest.fixture(scope="module")
def own_deployments(workplace: Workplace, project: Path) -> Iterator[Deployed]:
    """A worker in that folder for what `millrace deploy run.yaml` makes there."""
    here = Deployed(workplace.api, workplace.login, workplace.environment, project)
    here.millrace("deploy", "run.yaml", "--recipes")
    here.start_worker(workplace.folder / "worker.log")
    yield here
    here.close()
    for automation in here.ask("/automations/filter", {}):
        here.ask(f"/automations/{automation['id']}", method="DELETE")


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in which SGLang is found, on a host with three GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(tmp_path / "packages"))
    (tmp_path / "packages" / "sglang").mkdir(parents=True)
    return tmp_path / "packages"
