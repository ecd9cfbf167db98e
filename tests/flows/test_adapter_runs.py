"""Whole runs with trainer.lora: killed, replayed, merged, and started from the adapters of a supervised run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.errors import ConfigError
from millrace.flows.commands import app
from millrace.flows.commands.weights_after import configuration_after, weights_after
from millrace.flows.driver.stored_run import run_record
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import (
    Workplace,
    failures,
    generated,
    output_of,
    sync_records,
    trained,
    versions_of_samples,
)

LORA = ("trainer.lora={rank: 4, alpha: 8}", "algorithm.kl_coef=0.05")
LATER = {  # modes in which weights change amid requests, or travel another way
    "keep": ("pipeline.ahead=1", "pipeline.on_update=keep", "algorithm.correction.kind=truncate"),
    "broadcast": ("sync.kind=broadcast", "sync.bucket_mib=1"),
    "compared": ("sync.max_prompt_gap=0.001",),
}


def steps(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "iterations").glob("*/step.json"))
    return [step for file in files for step in json.loads(file.read_text())["steps"]]


def adapters(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "exports").iterdir())[-1]
    assert sorted(path.name for path in newest.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    return load_file(newest / "adapter_model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    left, right = adapters(one), adapters(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.fixture(scope="module")
def merged_run(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted, whose engines get merged weights."""
    root = tmp_path_factory.mktemp("adapters")
    out = workplace.train(root, *LORA)
    assert not failures(root / "a"), out
    return root / "a"


def test_the_first_step_is_the_models_and_later_ones_move_away(merged_run: Path) -> None:
    made = steps(merged_run)
    assert made[0]["kl"] == 0
    assert made[-1]["kl"] > 0
    assert all(step["logprob_gap_mean"] < 1e-5 for step in made if "logprob_gap_limit" in step)
    assert any(tensor.abs().max() > 0 for name, tensor in adapters(merged_run).items() if ".lora_B." in name)
    marker = json.loads((merged_run / "checkpoints" / "000003" / "complete.json").read_text())
    assert list(marker["base"]) == ["model.safetensors"]


@pytest.mark.slow
def test_a_killed_run_ends_alike(workplace: Workplace, merged_run: Path, tmp_path: Path) -> None:
    killed = tmp_path / "a"
    step = killed / "iterations" / "000002" / "step.json"
    workplace.train_and_kill(tmp_path, step.exists, *LORA)
    workplace.call("stop", "a", "--root", str(tmp_path))  # ranks are rebuilt from the checkpoint
    workplace.train(tmp_path, *LORA)
    assert trained(killed) == trained(merged_run)
    assert max(generated(killed).values()) == 1
    assert_same(killed, merged_run)


def test_a_run_is_replayed_and_its_adapters_are_merged(
    workplace: Workplace, merged_run: Path, tmp_path: Path
) -> None:
    root = str(merged_run.parent)
    assert "equal" in workplace.call("replay", "a", "--root", root, "--from", "0", "--to", "3")
    source, target = str(merged_run / "exports" / "000003"), str(tmp_path / "merged")
    assert "equal to" in workplace.call("convert", source, target, "--merge", "--verify")


@pytest.fixture
def weights(
    merged_run: Path, workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """The folder of weights after an iteration, with changes of the run's configuration."""
    monkeypatch.chdir(workplace.folder)
    root = str(merged_run.parent)
    record, folder = run_record(root, "a"), RunFolder(root, "a")

    def after(done: int, **changes: Any) -> Path:
        config = configuration_after(record, folder, done)
        for section, values in changes.items():
            config = config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
        return Path(weights_after(config, folder, record, done, tmp_path / str(done)))

    return after


def test_weights_after_an_export_are_the_models_with_what_its_adapters_add(
    merged_run: Path, workplace: Workplace, weights: Callable[..., Path]
) -> None:
    made = weights(3)
    assert weights(0) == Path("model")
    base, found = (load_file(folder / "model.safetensors") for folder in (workplace.folder / "model", made))
    pairs = adapters(merged_run)
    changed = set()
    for name, weight in base.items():
        a, b = (
            pairs.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight") for side in "AB"
        )
        if a is not None and b is not None:
            changed.add(name)
            weight = torch.addmm(weight.float(), b, a, alpha=2.0)
        assert torch.equal(found[name], weight.to(found[name].dtype)), name
    assert len(changed) == len(pairs) / 2 > 0
    assert any(not torch.equal(found[name], base[name]) for name in changed)


def test_other_weights_of_the_model_are_refused_by_the_files_name(
    workplace: Workplace, weights: Callable[..., Path], tmp_path: Path
) -> None:
    other = shutil.copytree(workplace.folder / "model", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file(
        {name: tensor + (name == "model.norm.weight") for name, tensor in tensors.items()},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(
        ConfigError, match=r"model.path = .*other: the run's adapters belong to another model.safet"
    ):
        weights(3, model={"path": str(other)})
    with pytest.raises(
        ConfigError, match=r"model.path = .*gone: the run's adapters belong to another model.safet"
    ):
        weights(3, model={"path": str(tmp_path / "gone")})


def test_chat_answers_with_two_states_of_the_adapters(
    workplace: Workplace, merged_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace.folder)
    given = ["chat", "a", "--compare", "0", "--root", str(merged_run.parent), "--seed", "1"]
    ended = CliRunner().invoke(app, [*given, "--max-new-tokens", "8"], input="3+4=\n")
    assert ended.exit_code == 0, ended.output
    said = " ".join(ended.output.split())
    assert "a after 3 iterations a before training" in said
    assert len(said.split("Ctrl-D the chat.")[1]) > 10


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.slow) for mode in LATER])
def test_adapters_reach_engines_in_other_modes(workplace: Workplace, tmp_path: Path, mode: str) -> None:
    out = workplace.train(tmp_path, *LORA, *LATER[mode])
    assert not failures(tmp_path / "a"), out
    assert max(step["kl"] for step in steps(tmp_path / "a")) > 0


@pytest.mark.slow
def test_a_run_starts_from_the_adapters_of_a_supervised_one(workplace: Workplace, tmp_path: Path) -> None:
    supervised = ("algorithm={loss: sft}", "rollout.samples_per_prompt=1", "rollout.prompts=16")
    workplace.train(tmp_path / "first", LORA[0], *supervised, "run.iterations=2", "evaluation.sets=[]")
    folder = sorted((tmp_path / "first" / "a" / "exports").iterdir())[-1]
    start = f"trainer.lora={{rank: 4, alpha: 8, path: {folder}}}"
    out = workplace.train(
        tmp_path / "second", start, LORA[1], "run.iterations=1", "sync.max_prompt_gap=0.001"
    )
    run = tmp_path / "second" / "a"
    assert not failures(run), out
    assert steps(run)[0]["kl"] == 0  # against the policy that the run started with
    first, second = adapters(tmp_path / "first" / "a"), adapters(run)
    gap = max(float((first[name] - second[name]).abs().max()) for name in first)
    assert 0 < gap < 0.01
    prints = json.loads((run / "run.json").read_text())["fingerprints"]["model"]
    assert "trainer.lora.path: adapter_model.safetensors" in prints


NAMES = (*LORA, "sync.lora=names", "engines.kind=embedded", "trainer.device=cpu")
LATE = ("pipeline.ahead=1", "algorithm.correction.kind=truncate")


@pytest.mark.parametrize(
    "ahead", [pytest.param((), marks=pytest.mark.slow, id="in turn"), pytest.param(LATE, id="ahead")]
)
def test_engines_serve_each_version_by_its_name_and_never_pause(
    workplace: Workplace, tmp_path: Path, ahead: tuple[str, ...]
) -> None:
    out = workplace.train(tmp_path, *NAMES, *ahead, "sync.max_prompt_gap=0.001")
    run = tmp_path / "a"
    assert not failures(run), out
    assert all(record["phases"].keys() == {"export", "load"} for record in sync_records(run))
    found = versions_of_samples(run)
    assert {len(each) for each in found} == {1}
    assert len({each[0] for each in found}) > 1
    gaps = [step["logprob_gap_mean"] for step in steps(run) if "logprob_gap_limit" in step]
    assert gaps
    assert max(gaps) < 1e-5


@pytest.mark.slow
def test_a_killed_run_with_names_ends_alike(workplace: Workplace, tmp_path: Path) -> None:
    whole, killed = (tmp_path / root / "a" for root in ("whole", "killed"))
    workplace.train(tmp_path / "whole", *NAMES)
    parts = killed / "iterations" / "000001" / "rollouts"
    workplace.train_and_kill(tmp_path / "killed", lambda: any(parts.glob("part-*")), *NAMES)
    workplace.train(tmp_path / "killed", *NAMES)
    assert trained(killed) == trained(whole)
    assert max(generated(killed).values()) == 1
    assert_same(killed, whole)


@pytest.mark.slow
def test_runs_that_share_an_engine_end_as_each_does_alone(workplace: Workplace, tmp_path: Path) -> None:
    runs = {seed: tmp_path / f"shared-{seed}" for seed in (0, 1)}
    slots = ("--max-loaded-loras", "4")
    with embedded_engine(workplace.folder / "model", *slots, log=tmp_path / "engine.log") as (url, _):
        engines = f"engines={{kind: external, addresses: ['{url}']}}"
        shared = (*LORA, "sync.lora=names", "trainer.device=cpu", engines)
        started = [
            workplace.start("train", "run.yaml", f"storage.root={root}", f"run.seed={seed}", *shared)
            for seed, root in runs.items()
        ]
        told = [output_of(process) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    for seed, root in runs.items():
        alone = tmp_path / f"alone-{seed}"
        workplace.train(alone, *NAMES, f"run.seed={seed}")
        assert trained(root / "a") == trained(alone / "a")
        assert_same(root / "a", alone / "a")
