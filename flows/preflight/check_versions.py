"""Compare the installed packages with the versions that millrace needs, and with the tested versions. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from millrace.connectors.engines.sglang.server_args import UNTOLD, server_args, sglang_finds
from millrace.core.config import RunConfig
from millrace.core.config.engine_kinds import SGLANG
from millrace.core.config.parts.problems import Problem
from millrace.flows.preflight.tested_versions import EXACT, SHOWN, TESTED, TESTED_SGLANG

BECAUSE = {  # reasons of bounds in pyproject.toml, if not that newer versions are untested
    "fastapi": "newer ones end Prefect's server at the first flow",
    "megatron-core": "its models and checkpoints are built by functions that a minor version may change",
    "psutil": "without it megatron-core's checkpoints hang",
    "sqlalchemy": "under newer ones Prefect's scheduler starts no run",
}


def needs() -> list[Requirement]:
    """Requirements of the installed millrace on this platform; none for a checkout that is not installed."""
    try:
        lines = metadata.requires("millrace") or []
    except metadata.PackageNotFoundError:
        return []
    needed = [Requirement(line) for line in lines]
    return [item for item in needed if item.marker is None or item.marker.evaluate({"extra": ""})]


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions by name of the installed packages."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_versions(needed: Sequence[Requirement], found: Mapping[str, str]) -> Iterator[Problem]:
    """A problem for each package that is missing, or whose version millrace does not work with."""
    for item in needed:
        version, wanted = found.get(item.name), str(item).partition(";")[0].strip()
        because = f" ({BECAUSE[item.name]})" if BECAUSE.get(item.name) else ""
        remedy = f"pip install '{wanted}', where millrace is installed"
        if version is None:
            yield Problem(item.name, None, f"is not installed, and millrace needs {wanted}{because}", remedy)
        elif not item.specifier.contains(version, prereleases=True):
            yield Problem(item.name, version, f"is installed, and millrace needs {wanted}{because}", remedy)


def untested(found: Mapping[str, str], tested: Mapping[str, Sequence[str]] = TESTED) -> dict[str, str]:
    """Versions by name whose minor was never tested; for packages in EXACT, every version that was not tested."""
    return {
        name: version
        for name, version in _others(found, tested).items()
        if name in EXACT or _minor(version) not in {_minor(known) for known in tested[name]}
    }


def other_patches(found: Mapping[str, str], tested: Mapping[str, Sequence[str]] = TESTED) -> dict[str, str]:
    """Versions by name that were not tested, although another version of the same minor was."""
    strange = untested(found, tested)
    return {name: version for name, version in _others(found, tested).items() if name not in strange}


def versions_line(config: RunConfig) -> str:
    """Versions for the plan: of the main packages, and every untested version."""
    found, tested = installed(["millrace", *TESTED]), dict(TESTED)
    shown = ["millrace", *SHOWN]
    if SGLANG in config.engines.kinds and sglang_finds("sglang"):
        version, _ = server_args()
        if version != UNTOLD:
            found["sglang"], tested["sglang"] = version, TESTED_SGLANG
            shown.append("sglang")
    line = ", ".join(f"{name} {found[name]}" for name in shown if name in found)
    differing = {
        "not tested": untested(found, tested),
        "tested in another patch": other_patches(found, tested),
    }
    lines = [
        f"{title}: {_with_tested(versions, tested)}" for title, versions in differing.items() if versions
    ]
    return "\n".join([line, *lines]) if lines else f"{line}: tested"


def _with_tested(versions: Mapping[str, str], tested: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} {versions[name]} (tested: {', '.join(tested[name])})" for name in versions)


def _others(found: Mapping[str, str], tested: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Versions by name that were not tested; local builds, such as +cpu, are not compared."""
    return {
        name: version
        for name, version in found.items()
        if name in tested and _public(version) not in {_public(known) for known in tested[name]}
    }


def _public(version: str) -> Version | str:
    try:
        return Version(Version(version).public)
    except InvalidVersion:
        return version


def _minor(version: str) -> tuple[int, ...] | str:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return version
