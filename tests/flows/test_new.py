"""`millrace new`: every recipe makes a folder whose run is valid, with a reward that knows the rows' answers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace import RewardInput
from millrace.core.config.reading.load import load_config
from millrace.flows.commands import app
from millrace.flows.commands.deploy import FILES
from millrace.flows.commands.new import NOT_TO_START_FROM, ROWS, recipes
from millrace.flows.preflight.check import check
from millrace.flows.quickstart import arithmetic

WRITTEN = ("run.yaml", "rewards.py", "train.jsonl", "held_out.jsonl")
RECIPES = [file.stem for file in recipes()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.output


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def reward_in(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("own_reward", folder / "rewards.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


def test_every_recipe_but_the_quickstarts_own_parts_can_be_named() -> None:
    assert {*RECIPES, *NOT_TO_START_FROM} == {file.stem for file in (FILES / "recipes").glob("*.yaml")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_makes_a_folder_whose_run_names_what_is_there_or_made(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = call("new", "My First_run", "--recipe", recipe)
    folder = Path("My First_run")
    assert {path.name for path in folder.iterdir()} == set(WRITTEN)
    assert f"recipe {recipe}" in said
    monkeypatch.chdir(folder)
    config = load_config("run.yaml")
    original = load_config(str(FILES / "recipes" / f"{recipe}.yaml"))
    assert config.run.name == "my-first_run"
    assert (config.algorithm.preset, config.run.iterations) == (
        original.algorithm.preset,
        original.run.iterations,
    )
    assert (config.rollout, config.trainer, config.engines) == (
        original.rollout,
        original.trainer,
        original.engines,
    )
    named = [config.model.path, config.algorithm.teacher, *(source.path for source in config.data.sources)]
    named += [held_out.path for held_out in config.evaluation.sets]
    for path in filter(None, named):
        assert Path(path).exists() or path.startswith(("models/", "Qwen/")), path
    assert not [path for path in named if path and Path(path).is_absolute()]
    assert config.run.prepare or config.model.path.startswith("Qwen/")
    train, held_out = rows(Path("train.jsonl")), rows(Path("held_out.jsonl"))
    assert {"train": len(train), "held_out": len(held_out)} == ROWS
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    score = reward_in(Path())
    for row in [*train, *held_out]:
        assert score(RewardInput(row["prompt"], row["label"], row["label"])) == 1.0
        assert score(RewardInput(row["prompt"], f"It is \\boxed{{{row['label']}}}.", row["label"])) == 1.0
        assert score(RewardInput(row["prompt"], f"{row['label']}1", row["label"])) == 0.0
        assert score(RewardInput(row["prompt"], "", row["label"])) == 0.0


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith("qwen3")])
def test_what_it_makes_passes_the_check_as_it_lies(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe for a GPU passes but for what a host without one lacks."""
    call("new", "start", "--recipe", recipe)
    monkeypatch.chdir("start")
    on_a_gpu = {"engines.kind", "trainer.device", "placement.colocate"}
    assert {problem.field for problem in check(load_config("run.yaml"))} <= (
        on_a_gpu if "gpu" in recipe else set()
    )


def test_held_out_rows_are_held_out_of_the_warm_up_too() -> None:
    call("new", "start")
    warm_up = {row["prompt"] for row in arithmetic(0)[200:]}
    assert not {row["prompt"] for row in rows(Path("start/held_out.jsonl"))} & warm_up


@pytest.mark.parametrize(
    "recipe", ["", "GRPO", "grpo.yaml", "bases/preset", "../grpo", "quickstart_warm_up", "ppo2"]
)
def test_an_unknown_recipe_is_answered_with_all_that_there_are(recipe: str) -> None:
    said = call("new", "start", "--recipe", recipe, code=2)
    for name in RECIPES:
        assert f"  {name} " in said
    assert "arXiv:2402.03300" in said
    assert not Path("start").exists()


@pytest.mark.parametrize("file", WRITTEN)
def test_a_folder_that_holds_such_a_file_is_left_as_it_is(file: str) -> None:
    Path("start").mkdir()
    Path("start", file).write_text("mine")
    said = call("new", "start", code=2)
    assert f"holds {file} already" in said
    assert [(path.name, path.read_text()) for path in Path("start").iterdir()] == [(file, "mine")]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("a", "a"),
        ("My Run", "my-run"),
        ("x/y", "y"),
        ("日本", "mine"),
        ("a--", "a"),
        (".hidden", "hidden"),
        ("a" * 80, "a" * 63),
        ("UPPER", "upper"),
        ("1.5", "1.5"),
        ("a b/c d", "c-d"),
    ],
)
def test_the_run_has_the_folders_name_as_a_runs_name_may_be(folder: str, name: str) -> None:
    call("new", folder)
    assert load_config(f"{folder}/run.yaml").run.name == name


def test_it_can_be_made_in_the_folder_where_one_stands(tmp_path: Path) -> None:
    call("new", ".")
    assert load_config("run.yaml").run.name == tmp_path.name.lower().rstrip("._-")


@pytest.mark.slow
def test_what_it_makes_trains_and_is_shown(workplace: Any, tmp_path: Path) -> None:
    """The default recipe as it lies, but for fewer iterations; the first start makes its model."""
    workplace.call("new", str(tmp_path / "start"))
    run = tmp_path / "start" / "run.yaml"
    few = ["run.iterations=3", f"storage.root={tmp_path}"]
    assert "3 iterations complete" in workplace.call("train", str(run), *few)
    assert "nothing is wrong" in workplace.call("verify", "start", "--root", str(tmp_path))
