"""`python -m tests.pairs` counts the outcomes of pairs. `--write` stores the table; `--cover` also chooses the covering runs again;
`--extend` keeps them, and adds runs for pairs of a new feature."""

from __future__ import annotations

import argparse
from collections import Counter

from tests.pairs.covering import covering
from tests.pairs.features import FEATURES
from tests.pairs.outcomes import to_run
from tests.pairs.table import kept_runs, table, write


def main() -> None:
    """Print the size of the table; keep it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.pairs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the table as it is now")
    parser.add_argument(
        "--cover", action="store_true", help="make the runs anew, and keep them and the table"
    )
    parser.add_argument(
        "--extend", action="store_true", help="add runs for the pairs that no run has, and keep them"
    )
    options = parser.parse_args()
    if options.cover or options.extend:
        runs = covering(to_run(), [] if options.cover else kept_runs())
    else:
        runs = kept_runs()
    if options.write or options.cover or options.extend:
        write(runs)
    kinds = Counter(line.partition(":")[0] for line in table(runs).values())
    print(f"{len(FEATURES)} features, {sum(kinds.values())} pairs, {len(runs)} runs")
    for kind, count in kinds.most_common():
        print(f"{count:6} {kind}")


if __name__ == "__main__":
    main()
