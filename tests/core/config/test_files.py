"""Files that build on another."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.core.config.algorithm import Cispo, Clipped
from millrace.core.config.engines import EmbeddedEngines
from millrace.core.config.reading.load import load_config
from millrace.core.errors import ConfigError

BASE = """
run: {name: a, iterations: 50}
model: {path: m}
data: {sources: [{name: sums, path: s.jsonl}]}
algorithm: {loss: {clip_high: 0.28}}
trainer: {schedule: {kind: linear, warmup_steps: 10}, optimizer: {lr: 1e-4}}
engines: {threads: 1, count: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "base.yaml").write_text(BASE)
    return tmp_path


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_changes_fields_of_its_base_and_overrides_change_both(folder: Path) -> None:
    text = "base: bases/base.yaml\nrun: {name: b}\ntrainer: {schedule: {kind: cosine}}\ndata: {sources: [{path: x.jsonl}]}\n"
    config = load_config(write(folder, "run.yaml", text), ["trainer.optimizer.lr=2e-4"])
    assert (config.run.name, config.run.iterations, config.trainer.optimizer.lr) == ("b", 50, 2e-4)
    assert (config.trainer.schedule.kind, config.trainer.schedule.warmup_steps) == ("cosine", 10)
    assert [source.path for source in config.data.sources] == [str(folder / "x.jsonl")]
    assert config.algorithm.loss == Clipped(clip_high=0.28)


def test_another_kind_takes_nothing_from_the_base(folder: Path) -> None:
    text = "base: bases/base.yaml\nalgorithm: {loss: cispo}\nengines: embedded\n"
    config = load_config(write(folder, "run.yaml", text), ["algorithm.loss.clip_high=4"])
    assert config.algorithm.loss == Cispo(clip_high=4)
    assert config.engines == EmbeddedEngines()


def test_bases_have_bases(folder: Path) -> None:
    write(folder, "bases/middle.yaml", "base: base.yaml\nrun: {seed: 3}\n")
    config = load_config(write(folder, "run.yaml", "base: bases/middle.yaml\nrun: {iterations: 7}\n"))
    assert (config.run.name, config.run.seed, config.run.iterations) == ("a", 3, 7)


def test_bases_in_a_circle_are_refused_with_the_chain(folder: Path) -> None:
    write(folder, "bases/one.yaml", "base: ../run.yaml\n")
    run = write(folder, "run.yaml", "base: bases/one.yaml\n")
    with pytest.raises(ConfigError, match=r"run\.yaml -> .*one\.yaml -> .*run\.yaml.*bases of each other"):
        load_config(run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: bases/none.yaml\n", r"run\.yaml -> .*none\.yaml.*cannot be read"),
        ("base: [a, b]\n", r"run\.yaml.*path of one YAML file"),
        ("base: bases/torn.yaml\n", r"run\.yaml -> .*torn\.yaml.*line 2"),
    ],
)
def test_a_base_that_cannot_be_read_is_refused_with_the_chain(folder: Path, text: str, message: str) -> None:
    write(folder, "bases/torn.yaml", "run: {name: a\nmodel: [")
    with pytest.raises(ConfigError, match=message):
        load_config(write(folder, "run.yaml", text))


def test_bare_words_and_mappings_are_changed_alike(folder: Path) -> None:
    text = BASE.replace("{clip_high: 0.28}", "cispo") + "sync: disk\n"
    config = load_config(write(folder, "run.yaml", text), ["algorithm.loss.clip_low=1", "sync.directory=/d"])
    assert config.algorithm.loss == Cispo(clip_low=1)
    assert (config.sync.kind, config.sync.directory) == ("disk", "/d")
