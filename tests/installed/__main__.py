"""`python -m tests.installed`: install the wheel into a fresh environment, without the lock, and train there what `millrace new` writes.

A root user installs, and another user, who may read the installation and not write it, makes the folder, checks, trains,
resumes and looks: what that user leaves outside the folder is an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from millrace.flows.preflight.check_versions import TESTED
from tests.installed.environment import NEWEST, OLDEST, Environment, build, needed
from tests.installed.passed import keep
from tests.installed.use import use


def main() -> None:
    """Install, use, and print the versions with which it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.installed", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument(
        "--oldest", action="store_true", help="the oldest versions of what pyproject.toml names"
    )
    parser.add_argument(
        "--torch", default="", help="installed first: torch==2.13.0+cpu; the newest if not given"
    )
    parser.add_argument(
        "--megatron-core",
        nargs="+",
        default=[],
        help="versions to use one after the other, 0.16.1 0.17.1, or each: all that are in tested_versions.py",
    )
    parser.add_argument(
        "--sdist", action="store_true", help="install a source distribution instead of a wheel"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="train at the size that `millrace new` writes: its first start makes a model",
    )
    parser.add_argument(
        "--keep", action="store_true", help="write the versions with which it passed into passed.json"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-installed-") as scratch:
        folder, started = Path(scratch), time.monotonic()
        folder.chmod(0o755)
        built = build(folder / "built", sdist=options.sdist)
        environment = Environment(folder / "environment", options.python)
        resolution = OLDEST if options.oldest else NEWEST
        environment.install(options.torch, [str(built), *(needed() if options.oldest else [])], resolution)
        print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
        uses = TESTED["megatron-core"] if options.megatron_core == ["each"] else options.megatron_core or [""]
        for version in uses:
            if version:
                environment.install("", [f"megatron-core=={version}"], NEWEST)
            versions = environment.versions()
            print("with", ", ".join(f"{name} {number}" for name, number in versions.items()), flush=True)
            use(environment, folder / f"user{version}", whole=options.whole)
            if options.keep:
                keep(environment.python_version(), resolution, versions)
        print(f"{len(uses)} passed, 0 failed in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
