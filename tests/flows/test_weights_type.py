"""`model.dtype: auto`: the stored type on GPUs, float32 on a CPU, and for a run that exists the type that it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from millrace.connectors.engines.embedded.launch import embedded_command
from millrace.connectors.engines.sglang.launch import sglang_command
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.engines import SglangEngines
from millrace.core.config.plan import make_plan
from millrace.core.config.reading.load import VERSION, load_config
from millrace.core.errors import ConfigError
from millrace.flows.commands import app
from millrace.flows.driver.named_model import of_new_run, settled, stored_as
from millrace.flows.driver.same_run import refused_in_branch, refused_in_run
from millrace.flows.preflight.check import check

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, stored in each type; config.json names it."""
    import torch

    folders = {}
    for dtype in TYPES:
        folder = build_tiny_model(tmp_path_factory.mktemp("models") / dtype, seed=0)
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name: t.to(getattr(torch, dtype)) for name, t in weights.items()}, folder / "model.safetensors"
        )
        change_config(folder, dtype=dtype)
        folders[dtype] = folder
    return folders


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of config.json, or remove those that are None."""
    file = folder / "config.json"
    changed = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))


def configuration(model: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"model.path={model}", *overrides], text=json.dumps(GOOD))


def start(config: RunConfig) -> None:
    """Leave what a start leaves: run.json with a settled configuration."""
    record = {
        "name": config.run.name,
        "config": settled(config).model_dump(mode="json"),
        "config_version": VERSION,
    }
    RunFolder("runs", config.run.name).store.write_sealed("run.json", record)


GOOD = {
    "run": {"name": "a"},
    "data": {"sources": [{"name": "sums", "path": "train.jsonl"}]},
    "rollout": {"prompts": 1, "samples_per_prompt": 2},
}
ON_GPU = ["trainer.device=cuda"]
REFUSED = "refused"
CASES = {  # stored, visible GPUs, overrides -> the type
    "float32 on a CPU": ("float32", "", [], "float32"),
    "bfloat16 on a CPU": ("bfloat16", "", [], "float32"),
    "float16 on a CPU": ("float16", "", [], "float32"),
    "float32 on a GPU": ("float32", "0", ON_GPU, "float32"),
    "bfloat16 on a GPU": ("bfloat16", "0", ON_GPU, "bfloat16"),
    "float16 on a GPU": ("float16", "0", ON_GPU, REFUSED),
    "a GPU that is found": ("bfloat16", "0,1", [], "bfloat16"),
    "a CPU although there is a GPU": ("bfloat16", "0", ["trainer.device=cpu"], "float32"),
    "a GPU that the driver does not see": ("bfloat16", "", ON_GPU, "bfloat16"),
    "set on a CPU": ("float32", "", ["model.dtype=bfloat16"], "bfloat16"),
    "set on a GPU": ("bfloat16", "0", [*ON_GPU, "model.dtype=float32"], "float32"),
    "float16, with a choice": ("float16", "0", [*ON_GPU, "model.dtype=bfloat16"], "bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_auto_is_the_stored_type_on_gpus_and_float32_on_a_cpu(
    case: str, tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, visible, overrides, wanted = CASES[case]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = configuration(tiny[stored], *overrides)
    if wanted != REFUSED:
        assert settled(config).model.dtype == settled(config).dtype == wanted
        return
    with pytest.raises(ConfigError, match=r"float16 cannot be trained.*bfloat16.*float32"):
        settled(config)
    (problem,) = [problem for problem in check(config) if problem.field == "model.dtype"]
    for remedy in ("bfloat16", "float32"):
        assert remedy in problem.remedy
        assert "model.dtype" not in {
            each.field for each in check(configuration(tiny[stored], *ON_GPU, f"model.dtype={remedy}"))
        }


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_stored_type_is_that_of_the_files_and_without_files_that_of_the_configuration(
    dtype: str, key: str | None, weights: bool, tiny: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny[dtype].iterdir():
        if weights or file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    change_config(folder, dtype=None, torch_dtype=None)
    if key:
        change_config(folder, **{key: dtype})
    assert stored_as(str(folder)) == (dtype if weights or key else "float32")


def test_a_run_keeps_the_type_of_its_first_start_on_another_machine(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny["bfloat16"]
    start(configuration(model))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    again = configuration(model, *ON_GPU)
    assert of_new_run(again) == "bfloat16"
    assert settled(again).dtype == "float32"
    assert "model.dtype" not in {problem.field for problem in check(again)}
    (problem,) = [
        each
        for each in check(configuration(model, *ON_GPU, "model.dtype=bfloat16"))
        if each.field == "model.dtype"
    ]
    assert "has 'float32'" in problem.reason


@pytest.mark.parametrize("refused", [refused_in_run, refused_in_branch])
@pytest.mark.parametrize("before", ["float32", "bfloat16"])
def test_auto_asks_for_no_other_type_and_a_set_one_does(
    refused: Any, before: str, tiny: dict[str, Path]
) -> None:
    stored = configuration(tiny["float32"], f"model.dtype={before}")
    for now in ("auto", "float32", "bfloat16"):
        found = [
            change.path for change in refused(stored, configuration(tiny["float32"], f"model.dtype={now}"))
        ]
        assert found == ([] if now in ("auto", before) else ["model.dtype"])


def test_a_branch_that_was_not_started_takes_its_parents_type(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = settled(configuration(tiny["bfloat16"])).model_dump(mode="json")
    RunFolder("runs", "a").store.write_sealed(
        "run.json", {"name": "a", "config": None, "config_version": VERSION, "parent": {"config": parent}}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert settled(configuration(tiny["bfloat16"], *ON_GPU)).dtype == "float32"


def test_what_auto_means_is_never_left_to_an_engine(tiny: dict[str, Path], tmp_path: Path) -> None:
    """SGLang's `auto` would serve the stored type while the trainer has another."""
    model = str(tiny["bfloat16"])

    def asked(command: list[str]) -> str:
        return command[command.index("--dtype") + 1]

    for device, wanted in (("cpu", "float32"), ("cuda", "bfloat16")):
        config = settled(configuration(tiny["bfloat16"], f"trainer.device={device}"))
        assert asked(embedded_command(config, model, tmp_path / "port")) == wanted
        on_gpu = config.model_copy(update={"engines": SglangEngines(kind="sglang")})
        assert asked(sglang_command(on_gpu, model, 1, 0, 2, tmp_path / "keys")) == wanted
    assert asked(embedded_command(configuration(tiny["bfloat16"]), model, tmp_path / "port")) == "float32"


def test_the_plan_says_the_stored_type_and_the_one_that_is_used(
    tiny: dict[str, Path],
) -> None:
    Path("run.yaml").write_text(json.dumps({**GOOD, "model": {"path": str(tiny["bfloat16"])}}))

    def line(*overrides: str) -> str:
        printed = CliRunner().invoke(app, ["check", "run.yaml", *overrides]).output
        (found,) = [line for line in printed.splitlines() if line.startswith("weights ")]
        return found.removeprefix("weights").strip()

    assert line() == (
        "stored in bfloat16; trained, served and exported in float32 (model.dtype: auto is float32 on a CPU)"
    )
    assert line("model.dtype=bfloat16") == "stored in bfloat16; trained, served and exported in bfloat16"
    assert line("model.dtype=float32") == "stored in bfloat16; trained, served and exported in float32"
    start(configuration(tiny["bfloat16"]))
    assert line().endswith("float32 (the run began so)")


def test_memory_is_that_of_the_type_that_is_used(tiny: dict[str, Path]) -> None:
    for device, name in (("cpu", "weights, float32"), ("cuda", "weights, bfloat16")):
        plan = make_plan(settled(configuration(tiny["bfloat16"], f"trainer.device={device}")), gpus=1)
        assert plan.trainer_memory[0].name == name


def test_an_option_that_needs_bfloat16_is_judged_by_what_auto_means(tiny: dict[str, Path]) -> None:
    option = 'trainer.megatron={"disable_bf16_reduced_precision_matmul": true}'
    found = {
        device: [str(p) for p in check(configuration(tiny["bfloat16"], option, f"trainer.device={device}"))]
        for device in ("cpu", "cuda")
    }
    assert any("model.dtype=bfloat16" in text for text in found["cpu"])
    assert not any("model.dtype=bfloat16" in text for text in found["cuda"])
