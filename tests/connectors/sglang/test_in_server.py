"""What SGLang's process loads of millrace: routers of GLM's mixtures that follow their weights, and memory given away when idle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.launch import EngineStart
from millrace.connectors.engines.sglang.launch import CORRECTED, launch_sglang
from millrace.core.config import RunConfig
from millrace.core.families.registry import BUILT_IN
from tests.support.tiny_models import save_tiny_model
from tests.support.wrong_configs import GOOD

# as SGLang 0.5.17 has it: the first call's weight serves all later ones
GATE = """
import torch

class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
        self.register_buffer("_weight_fp32", None, persistent=False)

    def forward(self, hidden_states):
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.float()
        return torch.nn.functional.linear(hidden_states.float(), self._weight_fp32)
"""
ROUTES = """
import importlib, os, torch
if name := os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
    importlib.import_module(name)
from sglang.srt.models.glm4_moe import Glm4MoeGate
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteGate
for kind in (Glm4MoeGate, Glm4MoeLiteGate):
    gate, hidden = kind(), torch.ones(2, 4, dtype=torch.bfloat16)
    assert gate(hidden).dtype == torch.float32
    with torch.no_grad():
        gate.weight.fill_(1)
    print(gate(hidden).sum().item())
"""


ADAPTER = """
class _TorchMemorySaverAdapterReal:
    def pause(self, tag):
        print(tag)
"""
# as SGLang has it: the environment is read once the registry is there
REGISTRY = """
import importlib, os

class _Registry:
    def register(self, package, overwrite=False):
        importlib.import_module(package)
        print(package, overwrite)

ModelRegistry = _Registry()
ModelRegistry.register(os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"], overwrite=True)
"""
# as a GPU that still works would show it: what is waited for comes first
PAUSES = """
import importlib, os, torch
torch.get_device_module().synchronize = lambda: print("idle")
if name := os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
    importlib.import_module(name)
from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterReal
_TorchMemorySaverAdapterReal().pause("weights")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the part of SGLang that is corrected."""
    models = tmp_path / "site" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for folder in (models, models.parent, models.parent.parent):
        (folder / "__init__.py").touch()
    for module, name in (("glm4_moe", "Glm4MoeGate"), ("glm4_moe_lite", "Glm4MoeLiteGate")):
        (models / f"{module}.py").write_text(GATE.format(name=name))
    (models / "registry.py").write_text(REGISTRY)
    utils = models.parent / "utils"
    utils.mkdir()
    (utils / "__init__.py").touch()
    (utils / "torch_memory_saver_adapter.py").write_text(ADAPTER)
    return tmp_path / "site"


def said_by(
    program: str, family: str, site: Path, folder: Path, **changes: Any
) -> tuple[list[str], dict[str, str]]:
    """What a program prints in the environment of an engine that serves a tiny model of a family, and that environment."""
    model = save_tiny_model(folder / "model", family, 96)
    config = RunConfig.model_validate({**GOOD, "engines": {"kind": "sglang"}, **changes})
    launch = launch_sglang(EngineStart(config, str(model), 0, "127.0.0.1", "key", folder))
    # the same libraries, and no millrace
    environment = {**launch.environment, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    return said.stdout.split(), environment


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "qwen3_moe"])
def test_routers_of_glm_follow_their_weights_and_other_models_are_served_as_they_are(
    family: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(site))
    said, environment = said_by(ROUTES, family, site, tmp_path)
    assert said == (["24.0"] * 2 if family != "qwen3_moe" else ["0.0"] * 2)
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(site)


@pytest.mark.parametrize(
    ("family", "offload", "expected"),
    [
        ("qwen3", True, ["idle", "weights"]),
        ("qwen3", False, ["weights"]),
        ("glm4_moe", True, ["idle", "weights"]),
    ],
)
def test_an_engine_that_sleeps_ends_its_work_before_its_memory_goes(
    family: str,
    offload: bool,
    expected: list[str],
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(site))
    shared = {"colocate": True, "offload_engines": offload}
    trainer = {**GOOD.get("trainer", {}), "device": "cuda"}
    said, _ = said_by(PAUSES, family, site, tmp_path, placement=shared, trainer=trainer)
    assert said == expected


@pytest.mark.parametrize(
    ("family", "own"), [("qwen3", "millrace_sleep_in_sglang"), ("glm4_moe", "millrace_in_sglang")]
)
def test_a_package_with_models_that_the_user_names_is_loaded_too(
    family: str, own: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(site))
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "my_models")
    (site / "my_models.py").touch()
    trainer = {**GOOD.get("trainer", {}), "device": "cuda"}
    said, _ = said_by(
        "import sglang.srt.models.registry",
        family,
        site,
        tmp_path,
        placement={"colocate": True},
        trainer=trainer,
    )
    assert said == ["my_models", "True", own, "True"]


def test_corrected_classes_are_those_of_families_here() -> None:
    assert {family.model_class for family in BUILT_IN} >= CORRECTED
