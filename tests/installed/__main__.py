"""`python -m tests.installed`: install the wheel into a fresh environment, without the lock, and train there in an empty folder.

A root user installs, and another user, who may read the installation and not write it, checks, trains, resumes and looks:
what that user leaves outside the folder is an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.installed.environment import NEWEST, OLDEST, Environment, build_wheel
from tests.installed.use import use


def main() -> None:
    """Install, use, and print the versions with which it went."""
    parser = argparse.ArgumentParser(prog="python -m tests.installed", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument(
        "--oldest", action="store_true", help="the oldest versions that pyproject.toml allows, not the newest"
    )
    parser.add_argument(
        "--torch", default="", help="torch to install first: torch==2.13.0+cpu; its newest when not given"
    )
    parser.add_argument(
        "--with", dest="beside", nargs="*", default=[], help="further requirements: megatron-core==0.17.1"
    )
    parser.add_argument(
        "--sdist", action="store_true", help="install from a source distribution, not from a wheel"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-installed-") as scratch:
        folder, started = Path(scratch), time.monotonic()
        folder.chmod(0o755)
        built = build_wheel(folder / "built", sdist=options.sdist)
        environment = Environment(folder / "environment", options.python)
        environment.install(
            options.torch, [str(built), *options.beside], OLDEST if options.oldest else NEWEST
        )
        print(f"installed in {time.monotonic() - started:.0f} s: {environment.versions()}", flush=True)
        use(environment, folder / "user")
        print(f"1 passed, 0 failed in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
