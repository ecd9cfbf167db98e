"""What SGLang's process loads of millrace: routers of GLM's mixtures that follow their weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the part of SGLang that is corrected."""
    models = tmp_path / "site" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    for folder in (models, models.parent, models.parent.parent):
        (folder / "__init__.py").touch()
    for module, name in (("glm4_moe", "Glm4MoeGate"), ("glm4_moe_lite", "Glm4MoeLiteGate")):
        (models / f"{module}.py").write_text(GATE.format(name=name))
    return tmp_path / "site"


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "qwen3_moe"])
def test_routers_of_glm_follow_their_weights_and_other_models_are_served_as_they_are(
    family: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(site))
    model = save_tiny_model(tmp_path / "model", family, 96)
    config = RunConfig.model_validate({**GOOD, "engines": {"kind": "sglang"}})
    launch = launch_sglang(EngineStart(config, str(model), 0, "127.0.0.1", "key", tmp_path))
    # the same libraries, and no millrace
    environment = {**launch.environment, "PYTHONSAFEPATH": "1"}
    said = subprocess.run(
        [sys.executable, "-c", ROUTES],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == (["24.0"] * 2 if family != "qwen3_moe" else ["0.0"] * 2)
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(site)


def test_corrected_classes_are_those_of_families_here() -> None:
    assert {family.model_class for family in BUILT_IN} >= CORRECTED
