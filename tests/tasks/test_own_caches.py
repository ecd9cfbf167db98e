"""What libraries keep for themselves lies in MILLRACE_HOME: nothing is written elsewhere in the user's home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import millrace

ROOT = Path(millrace.__file__).parent
DRAW = "from millrace.tasks.reporting import pictures; pictures.curves_png(pictures.Curves())"


def test_a_picture_leaves_nothing_in_the_users_home_but_in_millraces_own_folder(tmp_path: Path) -> None:
    """matplotlib keeps a list of fonts, by default in ~/.cache and ~/.config."""
    names = ("MPLCONFIGDIR", "MILLRACE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    subprocess.run([sys.executable, "-c", DRAW], env={**environment, "HOME": str(tmp_path)}, check=True)
    assert [path.name for path in tmp_path.iterdir()] == [".millrace"]
    assert list((tmp_path / ".millrace" / "matplotlib").glob("fontlist*"))


def test_every_import_of_matplotlib_comes_after_that() -> None:
    importing = {
        path.relative_to(ROOT): path.read_text()
        for folder in ("core", "connectors", "tasks", "flows")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(from|import) matplotlib", path.read_text(), re.MULTILINE)
    }
    assert importing
    for path, text in importing.items():
        for found in re.finditer(r"^.*\n\s*(from|import) matplotlib", text, re.MULTILINE):
            assert "keep_fonts_at_home()" in found.group(), path
