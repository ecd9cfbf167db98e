"""What a relative path means, and where functions are found: a row for every field that names a file or folder."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from millrace.core.config.parts.section import Reads
from millrace.core.config.reading.findings import all_fields
from millrace.core.config.reading.load import load_config
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import hidden_module, load, search_in
from tests.support.configuration_page import page

READS = {
    "model.path",
    "model.tokenizer",
    "model.chat_template",
    "algorithm.teacher",
    "algorithm.reference",
    "algorithm.advantage.critic.path",
    "trainer.lora.path",
    "data.sources[].path",
    "evaluation.sets[].path",
    "run.import_from",
}
WRITES = {"placement.kernel_cache", "storage.root", "sync.directory", "tracking.uri"}
NO_PATH = {  # named or described by a word for one
    "run.name",
    "pipeline.rollouts_from",
    "run.prepare.function",
    "trainer.rank",
    "filter.group_filter.function",
    "rollout.buffer.buffer_filter.function",
    "reward.function",
    "reward.named[].function",
    "data.sources[].reward.function",
    "data.sources[].rows.function",
    "data.sources[].images_key",
    "evaluation.sets[].images_key",
    "evaluation.sets[].reward.function",
    "rollout.session.environment.function",
    "rollout.session.function.function",
    "rollout.session.named[].function",
    "rollout.session.named[].name",
    "rollout.session.tools[].function",
    "algorithm.advantage.function",
    "algorithm.loss.function",
    "algorithm.shaping.function",
    "algorithm.teacher_server.hint.function",
    "engines.addresses",
    "evaluation.sets[].name",
    "reward.named[].name",
}
WORDS = re.compile(r"path|folder|\bfiles?\b|directory|root|\buri\b", re.IGNORECASE)
RUN = """
run: {name: a}
model: {path: model, tokenizer: ../tokenizer}
data: {sources: [{path: train.jsonl}, {name: far, path: "s3://bucket/far.jsonl"}, {name: at, path: /data/x.jsonl}]}
algorithm: {preset: opd, teacher: teacher}
evaluation: {sets: [{name: held_out, path: held_out.jsonl}]}
storage: {root: runs}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the folder `project` below it; the search path is put back at the end."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def loaded(file: str, text: str = RUN, *overrides: str) -> RunConfig:
    Path(file).write_text(text)
    return load_config(file, overrides)


def test_every_field_that_names_a_file_or_folder_is_one_of_these_kinds() -> None:
    marked = {
        path
        for path, field in all_fields().items()
        if any(isinstance(item, Reads) for item in field.metadata)
    }
    assert marked == READS
    named = {
        path
        for path, field in all_fields().items()
        if "str" in str(field.annotation) and WORDS.search(f"{path.rpartition('.')[2]} {field.description}")
    }
    assert named - READS - WRITES <= NO_PATH, sorted(named - READS - WRITES - NO_PATH)
    for path in READS | WRITES:
        assert f"`{path}`" in page().partition("**Changes.**")[0]


def test_a_pattern_and_a_slice_lie_beside_the_file_too(here: Path) -> None:
    text = RUN.replace("path: train.jsonl", 'path: "data/*.jsonl@[:3]"')
    assert loaded("project/run.yaml", text).data.sources[0].path == "project/data/*.jsonl@[:3]"


def test_what_a_run_reads_lies_beside_its_file_and_what_it_writes_where_it_starts(here: Path) -> None:
    config = loaded("project/run.yaml")
    assert (config.model.path, config.model.tokenizer) == ("project/model", "project/../tokenizer")
    paths = [source.path for source in config.data.sources]
    assert paths == ["project/train.jsonl", "s3://bucket/far.jsonl", "/data/x.jsonl"]
    assert config.algorithm.teacher == "project/teacher"
    assert config.evaluation.sets[0].path == "project/held_out.jsonl"
    assert config.storage.root == "runs"
    assert config.run.import_from == [str(here / "project")]


@pytest.mark.parametrize("file", ["run.yaml", "{here}/run.yaml", "./run.yaml"])
def test_beside_the_working_directory_nothing_changes(here: Path, file: str) -> None:
    config = loaded(file.format(here=here))
    assert (config.model.path, config.data.sources[0].path) == ("model", "train.jsonl")
    assert config.run.import_from == []


def test_overrides_and_texts_mean_the_working_directory_and_a_tilde_the_home(here: Path) -> None:
    config = loaded("project/run.yaml", RUN, "model.path=other", "data.sources.0.path=~/train.jsonl")
    assert config.model.path == "other"
    assert config.data.sources[0].path == os.path.expanduser("~/train.jsonl")
    assert load_config(None, text=RUN).model.path == "model"


def test_paths_of_a_base_mean_its_folder_and_both_folders_hold_modules(here: Path) -> None:
    (here / "shared").mkdir()
    (here / "shared" / "base.yaml").write_text(RUN)
    config = loaded("project/run.yaml", "base: ../shared/base.yaml\nmodel: {path: mine}\n")
    assert config.model.path == "project/mine"
    assert Path(config.data.sources[0].path).resolve() == here / "shared" / "train.jsonl"
    folders = [os.path.realpath(folder) for folder in config.run.import_from]
    assert folders == [str(here / "project"), str(here / "shared")]


def test_a_recipe_that_ships_has_no_folder_of_the_users(here: Path) -> None:
    recipe = Path(__file__).parents[3] / "deployments" / "recipes" / "quickstart.yaml"
    assert load_config(str(recipe)).model.path == "quickstart-files/seed-0/warm-model"
    config = loaded("project/run.yaml", f"base: {recipe}\nmodel: {{path: mine}}\n")
    assert (config.model.path, config.run.import_from) == ("project/mine", [str(here / "project")])
    assert config.data.sources[0].path == "quickstart-files/seed-0/train.jsonl"


def test_a_name_on_hugging_face_stays_unless_a_folder_is_there_or_is_to_be_made(here: Path) -> None:
    text = RUN.replace("path: model,", "path: Qwen/Qwen3-0.6B,")
    assert loaded("project/run.yaml", text).model.path == "Qwen/Qwen3-0.6B"
    made = text.replace("{name: a}", '{name: a, prepare: "a:b"}')
    assert loaded("project/run.yaml", made).model.path == "project/Qwen/Qwen3-0.6B"
    (here / "project" / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert loaded("project/run.yaml", text).model.path == "project/Qwen/Qwen3-0.6B"


def test_functions_are_found_beside_the_file_then_in_the_working_directory(here: Path) -> None:
    for folder, name, answer in (("project", "mine_a", 1), (".", "mine_a", 2), (".", "mine_b", 3)):
        (here / folder / f"{name}.py").write_text(f"def score(sample): return {answer}\n")
    config = loaded("project/run.yaml")
    search_in(config.run.import_from)
    assert load("mine_a:score")(None) == 1
    assert load("mine_b:score")(None) == 3
    assert config.for_actors()["run"]["import_from"] == [str(here / "project"), str(here)]
    assert hidden_module("mine_a:score") == (str(here / "mine_a.py"), str(here / "project" / "mine_a.py"))
    assert hidden_module("mine_b:score") is None


def test_an_installed_package_of_the_same_name_comes_first_and_is_named(here: Path) -> None:
    (here / "project" / "yaml.py").write_text("def score(sample): return 1\n")
    search_in(loaded("project/run.yaml").run.import_from)
    with pytest.raises(
        ConfigError, match=r"rename the one of yours: .*yaml/__init__.py is imported, and hides .*yaml.py"
    ):
        load("yaml:score", "reward.function")
    (here / "project" / "yaml.py").rename(here / "project" / "my_yaml.py")
    assert load("my_yaml:score", "reward.function")(None) == 1
