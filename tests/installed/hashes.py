"""`make lock`: requirements.hashes, the hashes of what requirements.lock names, in parts that `make setup` installs apart.

Asks the package index, by uv: for the hashes, and for what needs what.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.installed.environment import REPOSITORY, UV

LOCK, HASHES = REPOSITORY / "requirements.lock", REPOSITORY / "requirements.hashes"
HEADING = "# part: "
INSTALLER, NEEDED, TESTS, EXTRAS, TORCH = PARTS = ("pip", "needed", "tests", "extras", "torch")
COMPILE = [
    *UV,
    *("pip", "compile", "--quiet", "--universal", "--python-version", "3.11"),
    *("--no-annotate", "--no-header"),
]


def parts_of(locked: Iterable[str], needed: Iterable[str], for_tests: Iterable[str]) -> dict[str, list[str]]:
    """The names of each part. locked: all. needed: what millrace needs. for_tests: with the extra `dev`."""
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    needed, for_tests = set(needed), set(for_tests)
    for name in sorted(locked):
        if name in (INSTALLER, TORCH):
            parts[name].append(name)
        else:
            parts[NEEDED if name in needed else TESTS if name in for_tests else EXTRAS].append(name)
    return parts


def read_parts(text: str) -> dict[str, dict[str, tuple[Requirement, list[str]]]]:
    """Of each part the requirement of each package, and its hashes."""
    parts: dict[str, dict[str, tuple[Requirement, list[str]]]] = {}
    for block in text.replace("\\\n", "").split(HEADING)[1:]:
        part, _, lines = block.partition("\n")
        parts[part] = {}
        for line in lines.splitlines():
            requirement = Requirement(line.partition(" --hash")[0])
            parts[part][canonicalize_name(requirement.name)] = requirement, re.findall(r"--hash=(\S+)", line)
    return parts


def locked_versions() -> dict[str, str]:
    """What requirements.lock names."""
    lines = (line for line in LOCK.read_text().splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def main() -> None:
    """Write requirements.hashes."""
    locked = locked_versions()
    needed, for_tests = _resolved(), _resolved("--extra", "dev")
    markers = {**needed, **for_tests}
    written = []
    for part, names in parts_of(locked, needed, for_tests).items():
        pinned = (f"{name}=={locked[name]}{markers.get(name, '')}" for name in names)
        written.append(f"{HEADING}{part}\n{_compiled('--no-deps', '--generate-hashes', '-', given=pinned)}")
    HASHES.write_text("".join(written))


def _resolved(*extra: str) -> Mapping[str, str]:
    """What the project needs at the locked versions: names, and the marker of each, empty for most."""
    lines = _compiled("--constraint", str(LOCK), *extra, str(REPOSITORY / "pyproject.toml")).splitlines()
    found = [line.partition("==")[0] for line in lines]
    marked = [line.partition(" ;") for line in lines]
    return {
        canonicalize_name(name): f" ;{marker}" if marker else ""
        for name, (_, _, marker) in zip(found, marked, strict=True)
    }


def _compiled(*arguments: str, given: Iterable[str] = ()) -> str:
    done = subprocess.run(
        [*COMPILE, *arguments], input="\n".join(given), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
