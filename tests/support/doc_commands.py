"""Run the commands that pages print, as a reader types them: in an empty folder, without PYTHONPATH."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of a kind in a page of docs/, or in `PAGE#ANCHOR`, in order."""
    name, _, anchor = page.partition("#")
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", section(text, anchor) if anchor else text, re.DOTALL)


def section(text: str, anchor: str) -> str:
    """A page's text below the heading of an anchor, down to the next heading of its level or above."""
    fenced = [match.span() for match in re.finditer(r"```.*?```", text, re.DOTALL)]
    headings = [
        match
        for match in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE)
        if not any(start < match.start() < end for start, end in fenced)
    ]
    (found,) = [match for match in headings if anchor_of(match[2]) == anchor]
    ends = [match.start() for match in headings if match.start() > found.start() and match[1] in found[1]]
    return text[found.end() : min(ends, default=len(text))]


def anchor_of(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(page: str) -> list[str]:
    """The lines of a page's shell blocks, without their comments."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [" ".join(words) for line in lines if (words := _words(line))]


def _words(line: str) -> list[str]:
    return [shlex.quote(word) for word in shlex.split(line, comments=True)]


class Reader:
    """Someone with the pages and a folder. Commands are found as in an activated environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        kept.pop("PYTHONPATH", None)
        self.environment = {
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MILLRACE_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
        }

    def types(self, page: str, command: str, *more: str, expect: int = 0) -> str:
        """Run a command that the page has, with further arguments; returns what it printed."""
        words = shlex.split(command)
        assert " ".join(map(shlex.quote, words)) in commands(page), f"docs/{page}.md has no {command}"
        return self.calls(*words, *more, expect=expect)

    def calls(self, *words: str, expect: int = 0) -> str:
        """Run a command."""
        process = self.starts(*words)
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == expect, out
        return out

    def starts(self, *words: str) -> subprocess.Popen[str]:
        """Start a command in a process group of its own, as a terminal does."""
        return subprocess.Popen(
            words,
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def writes(self, page: str, kind: str, name: str, which: int = 0) -> Path:
        """Put one of the page's files into the folder."""
        path = self.folder / name
        path.write_text(blocks(page, kind)[which])
        return path
