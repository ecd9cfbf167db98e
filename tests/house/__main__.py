"""`python -m tests.house [FOLDER]`: print what breaks a rule of the house; exits with 1 if anything does.

Sizes of classes, folders and files are advice: they are printed, and do not fail.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.house.actor_calls import string_calls
from tests.house.imports import connector_imports, import_cycles
from tests.house.names import equal_class_names, equal_test_names
from tests.house.programs import lost_imports
from tests.house.sizes import large_classes, large_folders, long_files, long_functions
from tests.house.source import read_source

RULES = (
    string_calls,
    import_cycles,
    connector_imports,
    lost_imports,
    long_functions,
    equal_test_names,
    equal_class_names,
)
ADVICE = (large_classes, large_folders, long_files)


def main() -> int:
    """Check a checkout, this one if none is named."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    files = list(read_source(root))
    violations = sorted(violation for rule in RULES for violation in rule(files))
    advice = sorted(remark for rule in ADVICE for remark in rule(files))
    for remark in advice:
        print(f"advice: {remark}")
    for violation in violations:
        print(violation)
    print(f"house: {len(files)} files, {len(violations)} violations, {len(advice)} remarks")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
