"""Compare the installed packages with the versions that millrace needs, and with the tested versions. Imports none of them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from millrace.connectors.engines.sglang.server_args import UNTOLD, server_args, sglang_finds
from millrace.core.config import RunConfig
from millrace.core.config.engine_kinds import SGLANG
from millrace.core.config.parts.problems import Problem

TESTED: dict[str, tuple[str, ...]] = {
    "aiohttp": ("3.10.0", "3.14.5"),
    "docstring-parser": ("0.16", "0.18.0"),
    "duckdb": ("2.0.0", "2.0.1"),
    "fastapi": ("0.139.0", "0.150.0"),
    "fsspec": ("2025.3.0", "2026.9.0"),
    "jsonschema": ("4.18.0", "4.26.0"),
    "math-verify": ("0.8.0", "0.9.0"),
    "matplotlib": ("3.9.0", "3.11.2"),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "mlflow": ("3.17.0", "3.17.2"),
    "numpy": ("1.26.0", "2.4.6", "2.5.5"),
    "orjson": ("3.10.0", "3.13.0"),
    "packaging": ("26.3", "26.4"),
    "pillow": ("13.0.0",),
    "prefect": ("3.8.8", "3.9.1"),
    "prefect-ray": ("0.6.0",),
    "psutil": ("6.0.0", "7.2.2"),
    "pyarrow": ("17.0.0", "25.0.1"),
    "pydantic": ("2.10.1", "2.14.3", "2.14.4"),
    "pyyaml": ("6.0.1", "6.0.3", "6.0.4"),
    "ray": ("2.52.0", "2.60.0"),
    "rich": ("13.9.4", "15.0.0"),
    "s3fs": ("2025.3.0", "2026.9.0"),
    "safetensors": ("0.5.0", "0.8.0"),
    "sqlalchemy": ("2.0.20", "2.0.58"),
    "sympy": ("1.14.0",),
    "tenacity": ("9.0.0", "9.2.1"),
    "tokenizers": ("0.22.1", "0.23.3"),
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "transformers": ("5.12.0", "5.19.0", "5.24.0"),
    "typer": ("0.15.1", "0.29.2"),
    "typing-extensions": ("4.16.0",),
    "uvicorn": ("0.30.0", "0.54.0"),
}
TESTED_SGLANG = ("0.5.17", "0.5.23")  # on a GPU, and on a CPU by the contract suite of both engines
EXACT = ("megatron-core", "sglang")  # for these, another patch version counts as not tested
SHOWN = ("torch", "megatron-core", "transformers", "ray", "prefect")  # the plan always has them


BECAUSE = {  # reasons of bounds in pyproject.toml, if not that newer versions are untested
    "fastapi": "newer ones end Prefect's server at the first flow",
    "megatron-core": "its models and checkpoints are built by functions that a minor version may change",
    "psutil": "without it megatron-core's checkpoints hang",
    "sqlalchemy": "under newer ones Prefect's scheduler starts no run",
}


@cache
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
    return {name: version for name in names if (version := _version(name)) is not None}


@cache  # a package's description is parsed each time, which takes a third of a check
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
