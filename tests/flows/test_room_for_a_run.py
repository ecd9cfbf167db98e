"""What a run takes of this host is there, or `millrace check` names it: memory for its ranks, room on its disk."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.gpu.shapes import model_config
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.core.config.plan import trainer_memory
from millrace.core.config.reading.load import load_config
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.tensors import tensor_shapes
from millrace.flows.preflight.check import check
from millrace.flows.preflight.check_machine import check_disk


@pytest.fixture
def place(wrong_place: Path) -> Path:
    return wrong_place


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    for name in ("ID", "SECRET"):
        monkeypatch.setenv(f"AWS_{'ACCESS_KEY_' + name if name == 'ID' else 'SECRET_ACCESS_KEY'}", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "80")


def has_memory(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """Let this host have so much memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=gib * 2**30))


def has_disk(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """Let every disk have so much room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=gib * 2**30))


def test_a_host_without_memory_for_what_its_ranks_put_there(
    tmp_path: Path, sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.0 billion parameters: 12 bytes of each put aside, and 14 in a checkpoint."""
    hollow_model(tmp_path / "model", "4b")
    on_gpus = [f"model.path={tmp_path / 'model'}", "engines.kind=sglang", "placement.colocate=true"]
    on_gpus += ["model.dtype=bfloat16", "checkpoint.every=2"]

    def problems(*overrides: str) -> list[str]:
        return [str(problem) for problem in check(load_config("run.yaml", [*on_gpus, *overrides]))]

    has_disk(monkeypatch, 200)
    has_memory(monkeypatch, 100)
    assert problems() == []
    has_memory(monkeypatch, 90)
    (problem,) = problems()
    assert "keep 97 GiB in this host's memory, which is 90 GiB: optimizer while engines" in problem
    assert "checkpoint.background" in problem
    assert problems("checkpoint.every=100") == []  # at the end alone, when nothing goes on beside it
    assert problems("checkpoint.background=false") == []
    has_memory(monkeypatch, 40)
    (problem,) = problems("checkpoint.background=false")
    assert "placement.offload_trainer" in problem
    assert problems("checkpoint.background=false", "placement.offload_trainer=false") == []


def test_a_disk_without_room_for_what_the_run_saves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4.0 billion parameters: 14 bytes of each in a checkpoint, of which two are whole while a third is written."""
    hollow_model(place / "large", "4b")
    wanted = [f"model.path={place / 'large'}", "model.dtype=bfloat16", f"storage.root={place / 'runs'}"]
    wanted += ["run.name=saved", "run.iterations=10", "checkpoint.every=2", "checkpoint.export_last=false"]

    def problems(free_gib: int, *overrides: str) -> list[str]:
        has_disk(monkeypatch, free_gib)
        return [str(problem) for problem in check(load_config("run.yaml", [*wanted, *overrides]))]

    assert problems(160) == []
    (problem,) = problems(150)
    assert "checkpoint.keep_last = 2" in problem
    assert (
        f"keeps 157 GiB of weights (3 checkpoints at most at once 157 GiB), and the disk of {place}"
        in problem
    )
    assert "150 GiB for them" in problem
    assert problems(150, "checkpoint.keep_last=1") == []
    assert problems(55, "checkpoint.every=100") == []
    assert problems(50, "checkpoint.every=100") != []
    (problem,) = problems(55, "checkpoint.every=100", "checkpoint.export_last=true")
    assert "1 checkpoint 52.4 GiB, 1 export 7.49 GiB" in problem
    shape = architecture(read_hf_config(str(place / "large"), "model.path"))
    assert [*check_disk(load_config("run.yaml", [*wanted, "storage.root=s3://bucket/runs"]), shape)] == []
    saved = place / "runs" / "saved" / "checkpoints" / "000002" / "rank.distcp"
    saved.parent.mkdir(parents=True)
    with saved.open("wb") as file:
        file.truncate(52 * 2**30)  # it is there already, or makes room
    (saved.parent / "removed").symlink_to("meanwhile")  # listed, and not there to be looked at
    assert problems(110) == []
    assert problems(100) != []


def test_a_full_disk_is_no_matter_to_a_complete_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_disk(monkeypatch, 0)
    (problem,) = check(load_config("run.yaml", ["run.name=trained"]))  # three of four iterations
    assert problem.field == "checkpoint.keep_last"
    assert check(load_config("run.yaml", ["run.name=trained", "run.iterations=3"])) == []


def test_the_recipes_that_ship_pass() -> None:
    recipes = Path(__file__).parents[2] / "deployments" / "recipes"
    for recipe in sorted(set(recipes.glob("*.yaml")) - set(recipes.glob("qwen3*.yaml"))):
        config = load_config(str(recipe), ["run.prepare=millrace.flows.quickstart:prepare"])
        found = {problem.field for problem in check(config)}
        needs = {"trainer.device", "engines.kind"} if config.trainer.device == "cuda" else set()
        assert found <= needs, recipe.name  # of a GPU host, where this is none


def hollow_model(folder: Path, shape: str) -> None:
    """A checkpoint of a real size whose weights are a hole on the disk."""
    folder.mkdir()
    model_config(shape).save_pretrained(folder)
    header, end = {}, 0
    for name, sizes in tensor_shapes(architecture(read_hf_config(str(folder)))).items():
        start, end = end, end + 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    build_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize(
    ("recipe", "shape", "gpus", "gib"),
    [
        ("qwen3_0.6b_one_gpu", "0.6b", 1, 60),
        ("qwen3_4b_eight_gpus", "4b", 8, 60),
        ("qwen3_30b_a3b_lora_two_gpus", "30b-a3b", 2, 115),
    ],
)
def test_the_recipes_for_real_models_pass_with_models_of_their_size(
    recipe: str,
    shape: str,
    gpus: int,
    gib: int,
    tmp_path: Path,
    sglang: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hollow_model(tmp_path / "model", shape)
    rows = [{"prompt": f"{n} + 1 =", "label": str(n + 1)} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    has_memory(monkeypatch, 512)
    has_disk(monkeypatch, 300)
    paths = [f"model.path={tmp_path / 'model'}", f"storage.root={tmp_path / 'runs'}"]
    paths += [f"{which}.path={tmp_path / 'rows.jsonl'}" for which in ("data.sources.0", "evaluation.sets.0")]
    file = Path(__file__).parents[2] / "deployments" / "recipes" / f"{recipe}.yaml"
    config = load_config(str(file), paths)
    assert check(config) == []
    parts = trainer_memory(config, architecture(read_hf_config(str(tmp_path / "model"))))
    assert sum(part.size for part in parts) < gib * 2**30
