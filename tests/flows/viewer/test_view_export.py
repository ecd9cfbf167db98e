"""One file of a run, an iteration, a group or a sample: what is in it, that it loads nothing, and what the command refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.flows.commands import app
from tests.support.viewed_run import NAME, write_viewed_run

ATTACK = "</script><script>alert(1)</script><!-- & \u2028 \x1b[2J"
# by what is exported: arguments, and what the file can answer
FILES: dict[str, tuple[list[str], set[str]]] = {
    "run": ([], {"overview"}),
    "iteration": (["--at", "1"], {"iteration", "group"}),
    "group": (["--at", "1", "--group", "kept0"], {"group", "sample", "lineage", "tokens", "turns"}),
    "sample": (["--at", "1", "--sample", "kept0-0001"], {"sample", "lineage", "tokens", "turns"}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("runs"))
    write_viewed_run(folder, said=("5", ATTACK, "6"))
    return folder


def called(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["view", NAME, *arguments])


def stored(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        re.findall(r'<script type="application/json" id="stored">(.*?)</script>', page, re.DOTALL)[0]
    )
    return found


@pytest.mark.parametrize("what", FILES)
def test_a_file_holds_what_its_pages_ask(root: str, tmp_path: Path, what: str) -> None:
    arguments, answers = FILES[what]
    file = tmp_path / "out.html"
    ended = called("--root", root, "--export", str(file), *arguments)
    assert ended.exit_code == 0, ended.output
    page = file.read_text()
    held = stored(page)
    assert {key.split("/")[1].split("?")[0] for key in held["answers"]} == answers
    assert len(re.findall("<script", page)) == page.count("</script") == 2
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", page.split("<script")[0])
    assert "default-src 'none'" in page
    assert f'"first":"/{NAME}' in page


def test_texts_are_whole_in_it(root: str, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    called("--root", root, "--export", str(file), *FILES["sample"][0])
    (sample,) = [value for key, value in stored(file.read_text())["answers"].items() if "/sample?" in key]
    assert sample["messages"][-1]["parts"] == [{"kind": "text", "text": ATTACK, "name": ""}]


def test_what_cannot_be_exported_is_refused(root: str, tmp_path: Path) -> None:
    file = str(tmp_path / "out.html")
    for arguments, said in {
        ("--export", file, "--sample", "kept0-0001"): "needs its iteration",
        ("--export", file, "--at", "1", "--sample", "gone-0001"): "has no sample",
        ("--export", file, "--at", "9"): "has not started",
        ("--at", "1"): "go with --export",
    }.items():
        ended = called("--root", root, *arguments)
        assert ended.exit_code != 0
        assert said in " ".join(ended.output.split()) or said.split()[0] in ended.output
        assert not Path(file).exists()
