"""Compare the installed packages with the versions that millrace needs, and with those it was tested with. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from millrace.connectors.sglang.server_args import UNTOLD, server_args, sglang_finds
from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import Problem
from millrace.flows.preflight.tested_versions import EXACT, SHOWN, TESTED, TESTED_SGLANG

BECAUSE = {  # why a bound stands in pyproject.toml, if not because nothing beyond it was tested
    "fastapi": "newer ones end Prefect's server at the first flow",
    "megatron-core": "its models and checkpoints are built by functions that a minor version may change",
    "psutil": "without it megatron-core's checkpoints hang",
    "sqlalchemy": "under newer ones Prefect's scheduler starts no run",
}


def needs() -> list[Requirement]:
    """What the installed millrace needs here; nothing for a checkout that runs without being installed."""
    try:
        lines = metadata.requires("millrace") or []
    except metadata.PackageNotFoundError:
        return []
    needed = [Requirement(line) for line in lines]
    return [item for item in needed if item.marker is None or item.marker.evaluate({"extra": ""})]


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions by name, of the packages that are installed."""
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
    """Versions that no test has run with, by name."""
    return {
        name: version
        for name, version in found.items()
        if name in tested and _release(name, version) not in {_release(name, known) for known in tested[name]}
    }


def versions_line(config: RunConfig) -> str:
    """Versions for the plan: the principal ones, and each that no test has run with."""
    found, tested = installed(["millrace", *TESTED]), dict(TESTED)
    shown = ["millrace", *SHOWN]
    if config.engines.kind in ("auto", "sglang") and sglang_finds("sglang"):
        version, _ = server_args()
        if version != UNTOLD:
            found["sglang"], tested["sglang"] = version, TESTED_SGLANG
            shown.append("sglang")
    line = ", ".join(f"{name} {found[name]}" for name in shown if name in found)
    strange = untested(found, tested)
    if not strange:
        return f"{line}: tested"
    listed = ", ".join(
        f"{name} {version} (tested: {', '.join(tested[name])})" for name, version in strange.items()
    )
    return f"{line}\nnot tested: {listed}"


def _release(name: str, version: str) -> tuple[int, ...] | str:
    """What is compared of a version: the whole release of packages in EXACT, else its first two numbers."""
    try:
        release = Version(version).release
    except InvalidVersion:
        return version
    return release if name in EXACT else release[:2]
