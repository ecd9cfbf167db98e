"""What takes a run's weights takes those of a run with trainer.lora, or refuses its folders by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from millrace.connectors.trainers.adapters import FlatPairs, write_peft
from millrace.core.config.trainer import Lora
from millrace.core.families.adapters import targeted
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.flows.commands import COMMANDS, app
from tests.support.flow_runs import Workplace, failures

LORA = ("trainer.lora={rank: 4, alpha: 8}", "trainer.optimizer.lr=0.05", "run.iterations=2")
KEPT = ("checkpoint.every=1", "checkpoint.keep_last=3", "evaluation.every=1")
ROWS = ["prompt_id", "index", "prompt", "response", "reward", "scoring", "version"]
ADAPTERS = "it is a folder of adapters"
WEIGHTS: dict[str, str] = {  # what each command does with a run's weights; of no other command
    "branch": "starts from a checkpoint, which holds the adapters",
    "chat": "adds the adapters to the weights of model.path",
    "convert": "adds them with --merge, and refuses folders of adapters without",
    "eval": "adds the adapters to the weights of model.path",
    "replay": "trains the adapters again and compares them",
    "train": "goes on from a checkpoint, which holds the adapters",
}
NONE = {
    *("check", "deploy", "discard", "ledger", "models", "new", "plan", "pretrained", "quickstart", "runs"),
    *("score", "server", "show", "sql", "stop", "top", "ui", "verify", "view"),
}


@pytest.fixture(scope="module")
def run(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose engines get adapters by name, with checkpoints after each iteration and an export after the last."""
    root = tmp_path_factory.mktemp("lora")
    by_name = ("sync.lora=names", "engines.kind=embedded", "trainer.device=cpu")
    out = workplace.train(root, *LORA, *KEPT, *by_name)
    assert not failures(root / "a"), out
    return root / "a"


def typed(workplace: Workplace, monkeypatch: pytest.MonkeyPatch, *arguments: str, code: int = 0) -> str:
    """What a command prints that needs no server."""
    monkeypatch.chdir(workplace.folder)
    ended = CliRunner().invoke(app, list(arguments), input="3+4=\n")
    assert ended.exit_code == code, ended.output
    return " ".join(ended.output.split())


def rows(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file, columns=ROWS).to_pylist()  # type: ignore[no-any-return]


def test_every_command_has_a_row() -> None:
    assert WEIGHTS.keys() | NONE == set(COMMANDS)
    assert not WEIGHTS.keys() & NONE


@pytest.mark.slow
@pytest.mark.parametrize("at", ["0", "1", "2"])
def test_held_out_sets_are_answered_as_the_runs_engines_did(
    workplace: Workplace, run: Path, tmp_path: Path, at: str
) -> None:
    """0: before training; 1: made again from a checkpoint; 2: from an export."""
    workplace.call("eval", "a", "--at", at, "--root", str(run.parent), "--out", str(tmp_path))
    file = f"{int(at):06d}.parquet"
    assert rows(tmp_path / f"held_out-{file}") == rows(run / "eval" / "held_out" / file)


@pytest.fixture(scope="module")
def folder(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Adapters of the workplace's model."""
    made, model = tmp_path_factory.mktemp("adapters"), workplace.folder / "model"
    shape, lora = architecture(read_hf_config(str(model))), Lora(rank=2)
    pairs = {
        one.name: (torch.ones(2, one.inputs), torch.ones(one.outputs, 2))
        for one in targeted(shape, lora.targets)
    }
    write_peft(made, FlatPairs.of(pairs), lora, shape, str(model))
    return str(made)


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "FOLDER"],
        ["eval", "FOLDER", "--config", "run.yaml"],
        ["convert", "FOLDER", "made"],
        ["check", "run.yaml", "model.path=FOLDER"],
        ["check", "run.yaml", "algorithm.reference=FOLDER", "algorithm.kl_coef=0.1"],
        ["check", "run.yaml", "algorithm.teacher=FOLDER", "algorithm.preset=opd"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[2:3]),
)
def test_a_folder_of_adapters_is_refused_by_name_where_a_model_is_wanted(
    workplace: Workplace, folder: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    given = [each.replace("FOLDER", folder) for each in arguments]
    said = typed(workplace, monkeypatch, *given, code=2)
    assert ADAPTERS in said
    assert "--merge" in said


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_refused_by_name(
    workplace: Workplace, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = typed(workplace, monkeypatch, "convert", str(run / "checkpoints" / "000002"), "made", code=2)
    assert "it holds adapters alone" in said
    assert "--merge" in said


@pytest.mark.slow
def test_a_branch_goes_on_from_the_adapters(workplace: Workplace, run: Path) -> None:
    root = str(run.parent)
    workplace.call("branch", "a", "b", "--at", "1", "--root", root)
    workplace.train(
        root, "run.name=b", *LORA, *KEPT, "sync.lora=names", "engines.kind=embedded", "trainer.device=cpu"
    )
    one, other = (load_file(run.parent / name / "exports/000002/adapter_model.safetensors") for name in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    steps = [
        json.loads((run.parent / name / "iterations/000001/step.json").read_text())["steps"] for name in "ab"
    ]
    assert [each["loss"] for each in steps[0]] == [each["loss"] for each in steps[1]]
