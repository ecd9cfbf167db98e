"""A user's folder with its own packages core, tasks and flows: millrace trains there, from a checkout and from a wheel.

By the command line first; then a deployment on a worker resumes the same run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.installed.environment import PACKAGES, REPOSITORY, build
from tests.support.deployed import Deployed
from tests.support.flow_runs import Workplace, configuration, make_workplace
from tests.support.own_functions import LOSS, REWARD, assert_trained_by_them

BY_WHEEL = pytest.mark.parametrize(  # from a checkout every other test runs
    "project", [pytest.param("checkout", marks=pytest.mark.slow), "wheel"], indirect=True
)
SHADOW = 'raise AssertionError("the user\'s {name} was imported in place of millrace.{name}")\n'


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree."""
    return build(tmp_path_factory.mktemp("wheel"))


def test_a_wheel_holds_every_module_recipe_and_settings_file_and_no_test(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("millrace/")}
    modules = [path for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")]
    expected = {f"millrace/{path.relative_to(REPOSITORY)}" for path in modules}
    read = [*(REPOSITORY / "deployments").rglob("*.yaml"), REPOSITORY / "connectors/prefect/prefect.toml"]
    read += (REPOSITORY / "flows/viewer/page").iterdir()
    expected |= {f"millrace/{path.relative_to(REPOSITORY)}" for path in read}
    assert expected == packed - {"millrace/__init__.py", "millrace/py.typed"}
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "tests" in name]


def environment_with(wheel: Path, folder: Path) -> Path:
    """A fresh environment in which the wheel is installed; everything else comes from the environment of the tests."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    query = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    (borrowed,) = {path for path in sys.path if path.endswith("site-packages")}
    Path(site, "borrowed.pth").write_text(
        f"{borrowed}\n"
    )  # its own .pth files, a checkout's among them, are not read
    install = ["install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return python


class Project:
    """The user's folder, and millrace as it is installed there."""

    def __init__(self, place: Workplace, python: Path | str) -> None:
        self.place = place
        self.python = str(python)
        self.deployed: Deployed | None = None


@pytest.fixture(scope="module", params=["checkout", "wheel"])
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp(f"project-{request.param}")
    place = make_workplace(folder)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("" if name == "core" else SHADOW.format(name=name))
    (folder / "core" / "my_reward.py").write_text(REWARD)
    (folder / "core" / "my_loss.py").write_text(LOSS)
    (folder / "run.yaml").write_text(yaml.safe_dump(two_iterations()))
    if request.param == "wheel":
        python = environment_with(request.getfixturevalue("wheel"), folder / "environment")
        place.environment.pop("PYTHONPATH", None)
        place.command = [str(python.with_name("millrace"))]
        found = Project(place, python)
    else:
        place.environment["PYTHONPATH"] = str(REPOSITORY / "src")
        place.command = [sys.executable, "-P", "-m", "millrace.flows.commands"]
        found = Project(place, sys.executable)
    return found


@pytest.fixture(scope="module")
def served(project: Project) -> Iterator[Project]:
    """The folder with a Prefect server of its own."""
    project.place.call("server", "start")
    yield project
    if project.deployed and project.deployed.worker:
        project.deployed.kill_worker()
    project.place.call("server", "stop")


def two_iterations() -> dict[str, Any]:
    values = configuration()
    values["run"]["iterations"] = 2
    values["rollout"]["prompts"] = 4
    values["reward"]["function"] = "core.my_reward:score"
    values["algorithm"]["loss"] = {"kind": "function", "function": "core.my_loss:loss"}
    del values["evaluation"]
    return values


@BY_WHEEL
def test_check_finds_the_users_reward_and_names_it_if_it_is_missing(project: Project) -> None:
    assert "2 iterations" in project.place.call("check", "run.yaml")
    out = project.place.call("check", "run.yaml", "reward.function=core.my_reward:grade", expect=2)
    assert "core.my_reward has no function grade" in " ".join(out.split())


@pytest.mark.slow
@BY_WHEEL
def test_the_command_line_trains_with_the_users_functions(served: Project) -> None:
    assert "2 iterations complete, 2 of them now" in served.place.call("train", "run.yaml")
    assert_trained_by_them(served.place.folder / "runs" / "a", 2)


@pytest.mark.slow
@BY_WHEEL
def test_a_worker_resumes_the_run_from_the_users_folder(served: Project, tmp_path: Path) -> None:
    place = served.place
    *_, export, worker = place.call("deploy", PWD="/").splitlines()
    login = place.folder / "home" / "prefect-auth"
    pages = f"{place.api.removesuffix('/api')}/v2"
    assert (
        export
        == f'export PREFECT_API_URL={place.api} PREFECT_UI_URL={pages} PREFECT_API_AUTH_STRING="$(cat {login})"'
    )
    assert place.api.endswith("/api")
    assert worker == "prefect worker start --pool local"
    served.deployed = deployed = Deployed(place.api, place.login, place.environment, tmp_path, served.python)
    deployed.start_worker(place.folder / "worker.log")
    config = two_iterations()
    config["run"]["iterations"] = 3
    assert deployed.wait(deployed.start(config)) == "COMPLETED", (place.folder / "worker.log").read_text()
    assert_trained_by_them(place.folder / "runs" / "a", 3)


def test_only_the_checkout_is_imported_from_a_checkout(project: Project) -> None:
    code = "import millrace.core; print(millrace.core.__file__)"
    done = subprocess.run(
        [project.python, "-P", "-c", code],
        env=project.place.environment,
        cwd=project.place.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    in_checkout = str(REPOSITORY) in os.path.realpath(done.stdout.strip())
    assert in_checkout == (project.place.command[0] == sys.executable)


def test_a_source_distribution_holds_what_the_wheel_holds(wheel: Path, tmp_path: Path) -> None:
    """The links under src are followed: whoever unpacks it elsewhere has files."""
    with tarfile.open(build(tmp_path, sdist=True)) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        files = {name.partition("/src/")[2] for name in archive.getnames() if "/src/millrace/" in name}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("millrace/")}
    assert packed <= files
