"""A model that is named as on Hugging Face: checked by its small files, downloaded for training, kept at one commit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import VERSION, load_config
from millrace.core.errors import ConfigError
from millrace.flows.driver.named_model import at_commit, model_here
from millrace.flows.preflight.check import check
from tests.support.hub_server import TOKEN, Hub, hub_server, use_in_this_process
from tests.support.wrong_configs import GOOD

NAME = "some/tiny"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two commits of one model."""
    folder = tmp_path_factory.mktemp("models")
    one, other = (build_tiny_model(folder / str(seed), seed=seed) for seed in range(2))
    (one / "pytorch_model.bin").write_bytes(b"another format")
    return one, other


@pytest.fixture
def hub(models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    with hub_server() as site:
        site.push(NAME, models[0])
        use_in_this_process(site, tmp_path / "cache", monkeypatch)
        yield site


def configuration(*overrides: str) -> RunConfig:
    return load_config(None, [f"model.path={NAME}", *overrides], text=json.dumps(GOOD))


def names(hub: Hub) -> set[str]:
    return {line.partition(": ")[2] for line in hub.downloaded}


def test_check_reads_the_small_files_and_a_start_downloads_the_weights_once(hub: Hub) -> None:
    assert check(configuration()) == []
    assert "config.json" in names(hub)
    assert not names(hub) & {"model.safetensors", "pytorch_model.bin"}
    here = model_here(configuration())
    assert names(hub) >= {"model.safetensors", "tokenizer.json", "config.json"}
    assert "pytorch_model.bin" not in names(hub)
    assert Path(here.config.model.path, "model.safetensors").is_file()
    assert here.commit == list(hub.commits[NAME])[0]
    hub.downloaded.clear()
    assert model_here(configuration()) == here
    assert check(here.config) == []
    assert hub.downloaded == []


def test_a_run_keeps_its_commit_when_the_name_means_another(hub: Hub, models: tuple[Path, Path]) -> None:
    first = model_here(configuration())
    record = {"config": configuration().model_dump(mode="json"), "config_version": VERSION}
    record["model_commit"] = first.commit
    Store("runs").child("a").write_sealed("run.json", record)
    newer = hub.push(NAME, models[1])
    assert model_here(configuration()) == first
    assert at_commit(configuration(), first.commit) == first
    assert model_here(configuration("run.name=b")).commit == newer
    assert model_here(configuration("run.name=b", f"model.revision={first.commit}")).commit == first.commit
    with pytest.raises(ConfigError, match="no such branch, tag or commit"):
        model_here(configuration("run.name=b", "model.revision=v9"))
    shutil.rmtree("cache")  # another host
    assert model_here(configuration()).commit == first.commit


def test_without_a_network_the_cache_is_enough_and_else_the_way_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    check(configuration())
    whole = model_here(configuration())
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert model_here(configuration()) == whole
    assert check(configuration()) == []
    (problem,) = check(configuration("model.path=some/other"))
    assert problem.field == "model.path"
    assert "no such folder" in problem.reason
    assert "does not answer" in problem.reason
    assert "hf download NAME --local-dir FOLDER" in problem.remedy


@pytest.mark.parametrize(
    ("name", "revision", "field", "says"),
    [
        ("some/none", None, "model.path", "shows no such model to you"),
        ("some/private", None, "model.path", "HF_TOKEN"),
        ("some/gated", None, "model.path", "terms must be accepted"),
        (NAME, "v9", "model.revision", "no such branch, tag or commit"),
    ],
)
def test_what_hugging_face_refuses_is_one_problem_with_its_remedy(
    hub: Hub, models: tuple[Path, Path], name: str, revision: str | None, field: str, says: str
) -> None:
    for kind, held in (("private", hub.private), ("gated", hub.gated)):
        hub.push(f"some/{kind}", models[0])
        held.add(f"some/{kind}")
    (problem,) = check(configuration(f"model.path={name}", f"model.revision={revision or 'null'}"))
    assert problem.field == field
    assert says in str(problem)


def test_the_commands_environment_decides_and_no_token_is_shown(hub: Hub, models: tuple[Path, Path]) -> None:
    hub.push("some/private", models[0])
    hub.private.add("some/private")
    Path("run.yaml").write_text(json.dumps(GOOD))
    given = {"HF_ENDPOINT": hub.url, "HF_HOME": "home", "HF_TOKEN": TOKEN}
    command = [
        sys.executable,
        "-m",
        "millrace.flows.commands",
        "check",
        "run.yaml",
        "model.path=some/private",
    ]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Not checked: the weights of some/private" in " ".join(done.stdout.split())
    assert TOKEN not in done.stdout + done.stderr
