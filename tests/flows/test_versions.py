"""What is installed against what millrace needs and was tested with, and the Python that `make setup` takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from millrace.connectors.engines.sglang import server_args
from millrace.core.config import RunConfig
from millrace.flows.preflight import check_versions as versions
from millrace.flows.preflight.check_versions import EXACT, SHOWN, TESTED
from tests.installed import hashes
from tests.installed.passed import passed
from tests.support.wrong_configs import GOOD

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
NEEDED = [Requirement(line) for line in PROJECT["dependencies"]]
ON_GPUS = {"torch": "2.11.0"}  # docs/performance.md: what tests/gpu and the benchmarks ran with
OUTSIDE = {  # a version of each package that pyproject.toml does not allow
    "aiohttp": "3.9.0", "docstring-parser": "0.15", "duckdb": "1.5.6", "fastapi": "0.151.0", "fsspec": "2025.2.0",
    "jsonschema": "4.17.3", "math-verify": "0.7.0", "matplotlib": "3.8.4", "megatron-core": "0.20.0", "mlflow": "4.0.0",
    "numpy": "1.25.2", "orjson": "3.9.15", "packaging": "24.1", "pillow": "10.4.0", "prefect": "4.0.0", "prefect-ray": "0.5.3",
    "psutil": "5.9.8", "pyarrow": "16.1.0", "pydantic": "2.9.2", "pyyaml": "6.0", "ray": "2.51.2", "rich": "12.6.0",
    "s3fs": "2025.2.0", "safetensors": "0.4.5", "sqlalchemy": "2.1.0", "sympy": "1.12.1", "tenacity": "8.5.0",
    "tokenizers": "0.20.3", "torch": "2.10.0", "transformers": "6.0.0", "typer": "0.14.0", "typing-extensions": "4.11.0",
    "uvicorn": "0.29.0",
}  # fmt: skip


def test_every_package_that_is_needed_has_tested_versions_which_are_allowed() -> None:
    assert {item.name for item in NEEDED} == set(TESTED) == set(OUTSIDE)
    for item in NEEDED:
        assert all(item.specifier.contains(version) for version in TESTED[item.name]), item
        assert list(TESTED[item.name]) == sorted(TESTED[item.name], key=Version)
    assert {*SHOWN, *versions.BECAUSE} <= set(TESTED)


def test_tested_versions_are_those_of_the_lock_of_environments_that_passed_and_of_gpus() -> None:
    """`python -m tests.installed --keep` writes down an environment that passed."""
    environments = [hashes.locked_versions(), *passed().values(), ON_GPUS]
    seen = {name: {found[name] for found in environments if name in found} for name in TESTED}
    assert {name: tuple(sorted(versions, key=Version)) for name, versions in seen.items()} == TESTED


def test_the_wheel_passed_with_each_python_and_each_megatron_core_that_pyproject_allows() -> None:
    tried = {tuple(name.split(", ")) for name in passed()}
    pythons = [
        f"Python 3.{minor}"
        for minor in range(99)
        if f"3.{minor}.5" in SpecifierSet(PROJECT["requires-python"])
    ]
    (allowed,) = (item.specifier for item in NEEDED if item.name == "megatron-core")
    minors = [f"0.{minor}" for minor in range(99) if f"0.{minor}.9" in allowed]
    newest = {
        (python, megatron.rpartition(".")[0])
        for python, resolution, _, megatron in tried
        if resolution == "highest"
    }
    assert {python for python, _ in newest} == set(pythons)
    assert {f"megatron-core {minor}" for minor in minors} == {minor for _, minor in newest}
    patches = [f"0.{minor}.{patch}" for minor in range(16, 20) for patch in range(3)]
    published = {"0.16.0", "0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2"}
    allowed_patches = {patch for patch in patches if patch in allowed} & published
    assert allowed_patches == {megatron.removeprefix("megatron-core ") for *_, megatron in tried}
    assert "lowest-direct" in {resolution for _, resolution, *_ in tried}


def test_what_tests_run_with_is_tested() -> None:
    assert list(versions.check_versions(versions.needs(), versions.installed(list(TESTED)))) == []


@pytest.mark.parametrize("item", NEEDED, ids=lambda item: item.name)
def test_a_version_that_does_not_work_is_refused_with_the_one_to_install(item: Requirement) -> None:
    found = {name: known[-1] for name, known in TESTED.items()}
    assert list(versions.check_versions(NEEDED, found)) == []
    (problem,) = versions.check_versions(NEEDED, found | {item.name: OUTSIDE[item.name]})
    assert problem.field == item.name
    assert problem.value == OUTSIDE[item.name]
    assert f"pip install '{item}'" in problem.remedy
    assert versions.BECAUSE.get(item.name, "") in problem.reason
    del found[item.name]
    (problem,) = versions.check_versions(NEEDED, found)
    assert problem.field == item.name
    assert "is not installed" in problem.reason


def test_extras_and_other_platforms_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2",
        'mcp>=2; extra == "mcp"',
        'x>=1; sys_platform == "nowhere"',
        'y>=1; python_version >= "3"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert [item.name for item in versions.needs.__wrapped__()] == ["torch", "y"]


@pytest.mark.parametrize(
    ("name", "version", "is_"),
    [
        ("torch", "2.13.0+cpu", "tested"),
        ("torch", "2.13", "tested"),
        ("torch", "2.13.1", "another patch"),
        ("torch", "2.99.0", "untested"),
        ("torch", "2.12.0", "untested"),
        ("megatron-core", "0.19.2", "tested"),
        ("megatron-core", "0.19.0", "untested"),
        ("megatron-core", "0.18.0rc1", "untested"),
        ("megatron-core", "0.18.2rc1", "untested"),
        ("pydantic", "2.14.99", "another patch"),
        ("prefect", "3.10.0", "untested"),
        ("prefect", "3.9.0", "another patch"),
        ("prefect", "3.9.2", "another patch"),
        ("prefect", "3.9.1.dev2", "another patch"),
        ("sglang", "0.5.17", "tested"),
        ("sglang", "0.5.18", "untested"),
        ("ray", "as installed", "untested"),
        ("another", "1.0", "tested"),
    ],
)
def test_a_version_is_told_if_nothing_ran_with_it(name: str, version: str, is_: str) -> None:
    tested = {**TESTED, "sglang": versions.TESTED_SGLANG}
    one = {name: version}
    assert versions.untested(one, tested) == (one if is_ == "untested" else {})
    assert versions.other_patches(one, tested) == (one if is_ == "another patch" else {})
    assert set(EXACT) <= set(tested)


def test_the_plan_shows_the_versions_and_what_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"millrace": "0.1.0", **{name: known[0] for name, known in TESTED.items()}}
    monkeypatch.setattr(versions, "installed", lambda names: dict(found))
    config = RunConfig.model_validate(GOOD)
    monkeypatch.setattr(versions, "sglang_finds", lambda package: False)
    line = versions.versions_line(config)
    assert line.startswith(f"millrace 0.1.0, torch {TESTED['torch'][0]}, megatron-core 0.16.1, ")
    assert line.endswith(": tested")
    found["duckdb"] = "9.9"
    monkeypatch.setattr(versions, "sglang_finds", lambda package: True)
    monkeypatch.setattr(versions, "server_args", lambda: ("0.5.99", {}))
    shown, strange = versions.versions_line(config).split("\n")
    assert shown.endswith("sglang 0.5.99")
    assert strange == (
        f"not tested: duckdb 9.9 (tested: {', '.join(TESTED['duckdb'])}), sglang 0.5.99 (tested: 0.5.17, 0.5.23)"
    )
    found["prefect"] = "3.9.0"
    _, _, patches = versions.versions_line(config).split("\n")
    assert patches == f"tested in another patch: prefect 3.9.0 (tested: {', '.join(TESTED['prefect'])})"
    monkeypatch.setattr(versions, "server_args", lambda: (server_args.UNTOLD, {}))
    assert "sglang" not in versions.versions_line(config)


@pytest.mark.parametrize("minor", range(8, 16))
def test_make_setup_says_which_python_it_takes(minor: int, tmp_path: Path) -> None:
    """Instead of pip's ResolutionImpossible, or of a venv without torch."""
    allowed = PROJECT["requires-python"]
    python = tmp_path / "python"
    code = f"import sys; sys.version_info = (3, {minor}, 0, 'final', 0); exec(sys.argv[2])"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{code}" "$@"\nexit 7\n')
    python.chmod(0o755)
    make = ["make", "--no-print-directory", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True)
    refused = (
        f"millrace needs Python 3.11 or 3.12, and {python} is Python 3.{minor}.0" in done.stdout + done.stderr
    )
    assert refused == (Version(f"3.{minor}.0") not in Requirement(f"x{allowed}").specifier)
    assert done.returncode != 0
    assert not (tmp_path / "venv").exists()


HASHED = hashes.read_parts(hashes.HASHES.read_text())


def test_the_hashes_are_those_of_the_lock() -> None:
    """`make lock` was called after the last change of a version."""
    entries = [entry for part in HASHED.values() for entry in part.items()]
    pinned = {name: str(requirement.specifier).removeprefix("==") for name, (requirement, _) in entries}
    assert pinned == hashes.locked_versions()
    assert len(entries) == len(pinned) > 200
    digest = re.compile(r"sha256:[0-9a-f]{64}")
    assert all(hashes and all(map(digest.fullmatch, hashes)) for _, (_, hashes) in entries)


def test_the_parts_of_the_hashes_are_what_each_step_of_make_setup_needs() -> None:
    """Without one, pip would have to look for it, and compare no hash."""
    own, for_tests = needs_of("millrace"), needs_of("millrace", "dev")
    assert [set(HASHED[part]) for part in (hashes.INSTALLER, hashes.TORCH)] == [{"pip"}, {"torch"}]
    assert own <= {*HASHED[hashes.NEEDED], "torch"}
    assert for_tests - own <= set(HASHED[hashes.TESTS])
    assert not for_tests & set(HASHED[hashes.EXTRAS])
    assert list(HASHED) == list(hashes.PARTS)


def needs_of(name: str, *extras: str) -> set[str]:
    """All that a package needs here, as the metadata of what is installed tell; not it itself."""
    found: set[tuple[str, str]] = set()
    left = [(name, extra) for extra in ("", *extras)]
    while left:
        package, extra = left.pop()
        if (package, extra) in found:
            continue
        found.add((package, extra))
        for item in map(Requirement, metadata.requires(package) or []):
            if item.marker is None or item.marker.evaluate({"extra": extra}):
                left += [(canonicalize_name(item.name), part) for part in ("", *item.extras)]
    return {package for package, _ in found} - {name}


@pytest.mark.parametrize("options", [(), ("UV=/somewhere/uv",), ("GPU=1",)], ids=repr)
def test_make_setup_compares_the_hash_of_each_file_but_torchs(options: tuple[str, ...]) -> None:
    make = ["make", "--no-print-directory", "--dry-run", "--always-make", "setup", *options]
    done = subprocess.run(make, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    installs = [line for line in done.stdout.splitlines() if " install " in line]
    hashed: list[str] = []
    others: list[str] = []
    for line in installs:
        (hashed if " --no-deps --require-hashes --only-binary :all: " in line else others).append(line)
    assert [line.rpartition("/")[2] for line in hashed] == ["pip.txt", "needed.txt", "tests.txt"]
    *torch, project = others
    requirement, _ = HASHED[hashes.TORCH]["torch"]
    assert torch
    assert all(line.removesuffix(" || \\").removesuffix("+cpu").endswith(f" {requirement}") for line in torch)
    assert " --no-deps --no-build-isolation --editable ." in project
    assert done.stdout.index("needed.txt") < done.stdout.index("torch==") < done.stdout.index(" check\n")


def test_an_audit_without_a_network_says_so(tmp_path: Path) -> None:
    closed = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    make = [
        *("make", "--no-print-directory", "audit"),
        *(f"PYTHON={sys.executable}", f"VENV={tmp_path / 'venv'}"),
    ]
    done = subprocess.run(make, cwd=REPOSITORY, env=closed, capture_output=True, text=True)
    assert done.returncode == 2
    assert "for advisories, and needs a network: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
