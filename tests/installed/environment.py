"""Builds the wheel or the source distribution, and a virtual environment with it. Owns how versions are chosen: by uv."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from millrace.flows.preflight.check_versions import TESTED

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("core", "connectors", "tasks", "flows", "deployments")
FILES = ("pyproject.toml", "README.md", "LICENSE")
UV = [sys.executable, "-m", "uv"]
NEWEST, OLDEST = "highest", "lowest-direct"  # uv's words; direct is what a command names, not what that needs


def copy_tree(folder: Path) -> Path:
    """A copy of what is packed, so that building leaves nothing in the checkout."""
    for name in ("src", *PACKAGES):
        shutil.copytree(
            REPOSITORY / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"),
        )
    for name in FILES:
        shutil.copy(REPOSITORY / name, folder)
    return folder


def build(folder: Path, *, sdist: bool = False) -> Path:
    """A wheel of the checkout, or a source distribution."""
    tree = copy_tree(folder / "tree")
    if sdist:
        code = f"from setuptools import build_meta as b; print(b.build_sdist({str(folder)!r}))"
        subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    else:
        build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", *build, str(tree)], check=True)
    (built,) = (path for path in folder.iterdir() if path.is_file())
    return built


def needed() -> list[str]:
    """What pyproject.toml names: the requirements beside a wheel of which uv takes the oldest."""
    dependencies: list[str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    return dependencies


class Environment:
    """A virtual environment that holds nothing but what `install` puts there."""

    def __init__(self, folder: Path, python: str) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.millrace = folder / "bin" / "millrace"

    def install(self, torch: str, requirements: Sequence[str], resolution: str) -> None:
        """Install torch first, if one is named, by pip, which finds CPU builds; then the requirements, which keep it."""
        kept: list[str] = []
        if torch:
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(self.python),
                "install",
                "--quiet",
                "--no-compile",
            ]
            subprocess.run([*pip, torch], check=True)
            kept = [torch]
        into = ["pip", "install", "--quiet", "--python", str(self.python), "--resolution", resolution]
        subprocess.run([*UV, *into, *requirements, *kept], check=True)

    def python_version(self) -> str:
        """Of the interpreter, without its patch."""
        code = "import sys; print(*sys.version_info[:2], sep='.')"
        return subprocess.run(
            [self.python, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()

    def versions(self) -> dict[str, str]:
        """Of the packages that millrace needs."""
        code = "import json, sys; from importlib import metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        told = subprocess.run([self.python, "-c", code, *TESTED], check=True, capture_output=True, text=True)
        found: dict[str, str] = json.loads(told.stdout)
        return found
