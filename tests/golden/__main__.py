"""`python -m tests.golden`: train fifty steps a family and print the first step that differs from the kept curve."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.golden.curves import FAMILIES, KEPT, TOLERANCE, difference, read, train, write
from tests.support.trainer_ranks import Workers


def main() -> None:
    """Compare every family, or keep new curves; exit 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--folder", type=Path, default=KEPT, help="where curves are kept")
    parser.add_argument("--write", action="store_true", help="keep what is trained now instead")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="relative; 0 for two versions on one machine"
    )
    options = parser.parse_args()
    workers, different = Workers(), 0
    try:
        for family in options.families:
            curve = train(workers, family)
            if options.write:
                write(family, curve, options.folder)
            found = difference(read(family, options.folder), curve, options.tolerance)
            different += found is not None
            print(f"{family:10} {found or 'equal'}", flush=True)
    finally:
        workers.close()
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
