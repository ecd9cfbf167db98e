"""Every path that a configuration names, closed, absent or of another kind: `check` names the path and a remedy, and goes on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.flows.commands import app
from tests.support.permissions import modes_hold
from tests.support.wrong_configs import write_good

REWARD = "def score(sample, **_):\n    return 1.0\n"


def closed(path: Path) -> None:
    path.chmod(0)


def not_searchable(path: Path) -> None:
    path.chmod(0o400 if path.is_dir() else 0o200)


def absent(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def other_kind(path: Path) -> None:
    was_folder = path.is_dir()
    absent(path)
    path.write_text("x") if was_folder else path.mkdir()


def loop(path: Path) -> None:
    absent(path)
    path.symlink_to(path.name)


FAULTS = (closed, not_searchable, absent, other_kind, loop)
CLOSED = (closed, not_searchable)


@dataclass(frozen=True)
class Named:
    """A path that a configuration names: overrides that name it, the field, and faults with which the run goes."""

    field: str
    path: str
    overrides: tuple[str, ...] = ()
    allowed: tuple[Callable[[Path], None], ...] = ()


STORE = ("storage.root=store",)
PATHS = [
    Named("model.path", "model"),
    Named("model.path", "up/model", ("model.path=./up/model",)),
    Named("model.path", "up", ("model.path=./up/model",)),
    Named("model.path", "model/config.json"),
    Named("model.path", "model/model.safetensors"),
    Named("model.path", "model/tokenizer.json"),
    Named("model.path", "model/tokenizer_config.json"),
    Named("model.tokenizer", "tokenizer", ("model.tokenizer=tokenizer",)),
    Named("model.chat_template", "chat.jinja", ("model.chat_template=chat.jinja",)),
    Named("algorithm.teacher", "teacher", ("algorithm.preset=opd", "algorithm.teacher=teacher")),
    Named("data.sources.sums.path", "train.jsonl"),
    Named("data.sources.d.path", "rows", ("data.sources=[{name: d, path: rows}]",)),
    Named(
        "evaluation.sets.held_out.path", "held_out.jsonl", ("evaluation.sets.held_out.path=held_out.jsonl",)
    ),
    Named("reward.function", "own_reward.py", ("reward.function=own_reward:score",)),
    Named("reward.function", "own_package", ("reward.function=own_package.rewards:score",)),
    Named("reward.function", "code", ("run.import_from=[code]", "reward.function=of_code:score")),
    Named("filter.group_filter", "own_filter.py", ("filter.group_filter=own_filter:score",)),
    Named("run.yaml", "run.yaml"),
    Named("base.yaml", "base.yaml"),
    Named("storage.root", "store", STORE, allowed=(absent,)),
    Named("storage.root", "up", ("storage.root=up/store",), allowed=(absent,)),
    Named("run.name", "store/a", STORE, allowed=(absent,)),
    Named("run.name", "store/a/run.json", STORE, allowed=(absent,)),
    Named("sync.directory", "weights", ("sync.kind=disk", "sync.directory=weights")),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every named path is there and open."""
    folder = tmp_path_factory.mktemp("good")
    write_good(folder)
    for copy in ("tokenizer", "teacher", "up/model"):
        shutil.copytree(folder / "model", folder / copy)
    for place in ("rows", "own_package", "code", "store", "up/store", "weights"):
        (folder / place).mkdir(exist_ok=True)
    shutil.copy(folder / "train.jsonl", folder / "rows")
    shutil.copy(folder / "train.jsonl", folder / "held_out.jsonl")
    for module in ("own_reward", "own_package/rewards", "code/of_code"):
        (folder / f"{module}.py").write_text(REWARD)
    (folder / "own_filter.py").write_text(REWARD.replace("sample", "samples"))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "run.yaml").rename(folder / "base.yaml")
    (folder / "run.yaml").write_text("base: base.yaml\n")
    return folder


@pytest.fixture
def place(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "place"
    shutil.copytree(good, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setenv("COLUMNS", "100")
    yield folder
    for name in ("own_reward", "own_package", "own_package.rewards", "of_code", "own_filter"):
        sys.modules.pop(name, None)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("named", PATHS, ids=lambda named: f"{named.field}-{named.path}")
def test_a_path_that_cannot_be_used_is_named_with_a_remedy(
    place: Path, named: Named, fault: Callable[[Path], None]
) -> None:
    path = place / named.path
    if named.field == "run.name":
        (place / "store/a").mkdir()
        (place / "store/a/run.json").write_text("{}")
    fault(path)
    with modes_hold():
        result = CliRunner().invoke(app, ["check", "run.yaml", *named.overrides])
    said = " ".join(result.output.split())
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    if fault in named.allowed:
        return
    assert result.exit_code == 2, said
    assert named.field in said
    assert Path(named.path).name.removesuffix(".py") in said
    assert "; " in said
    if fault in CLOSED:
        assert f"uid {os.geteuid()}" in said or "permissions" in said, said
