"""`millrace convert` as docs/models.md shows it, and its deployment on a worker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from millrace.flows.driver.conversion_order import order_of
from tests.support.deployed import Deployed
from tests.support.doc_commands import Reader, commands
from tests.support.flow_runs import Workplace
from tests.support.tiny_models import save_tiny_model

SECTION = "models#convert"


def assert_same_weights(folder: Path, wanted: Path) -> None:
    found, original = load_file(folder / "model.safetensors"), load_file(wanted / "model.safetensors")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())


def test_the_pages_commands_convert_there_and_back_and_a_runs_checkpoint(
    whole: Path, workplace: Workplace, tmp_path: Path
) -> None:
    reader = Reader(tmp_path)
    save_tiny_model(tmp_path / "Qwen3-0.6B", "qwen3", 37)
    (tmp_path / "runs").mkdir()
    shutil.copytree(whole, tmp_path / "runs" / "mine")
    (tmp_path / "runs/mine/checkpoints/000003").rename(tmp_path / "runs/mine/checkpoints/000200")
    there, back, run, theirs, half = commands(SECTION)

    assert "Qwen3-0.6B-dist: equal to Qwen3-0.6B, bit for bit" in reader.types(SECTION, there)
    reader.types(SECTION, back)
    assert_same_weights(tmp_path / "Qwen3-0.6B-again", tmp_path / "Qwen3-0.6B")
    refused = reader.calls("millrace", "convert", "runs/mine/checkpoints/000200", "other", expect=2)
    assert "model.path of its run is model, which is no folder here; name it: --model FOLDER" in refused
    (tmp_path / "model").symlink_to(workplace.folder / "model")
    reader.types(SECTION, run)
    assert_same_weights(tmp_path / "mine-000200", whole / "exports" / "000003")
    shutil.copytree(tmp_path / "Qwen3-0.6B-dist", tmp_path / "slime" / "Qwen3-0.6B")
    reader.types(SECTION, theirs)
    assert_same_weights(tmp_path / "theirs", tmp_path / "Qwen3-0.6B")
    reader.types(SECTION, half)
    assert "half: one lies in the other" in reader.calls("millrace", "convert", "half", "half", expect=2)


def test_an_address_of_a_store_is_refused() -> None:
    with pytest.raises(
        Exception, match="source = s3://a/b: weights are read and written on this host's disks; copy"
    ):
        order_of("s3://a/b", "c")


@pytest.mark.slow
def test_its_deployment_converts_on_a_worker(own_deployments: Deployed, project: Path) -> None:
    save_tiny_model(project / "tiny", "qwen3", 37)
    parameters = {"source": "tiny", "target": "tiny-dist"}
    flow_run = own_deployments.start_deployment("convert/convert", parameters)
    assert own_deployments.wait(flow_run) == "COMPLETED"
    assert (project / "tiny-dist" / "latest_checkpointed_iteration.txt").read_text() == "release\n"
