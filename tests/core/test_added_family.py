"""A family that another package adds, as docs/models.md shows it: found by every process, and read, mapped and run like those here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.core.families import registry
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import resolved
from millrace.core.families.llama import LLAMA
from millrace.core.families.registry import BUILT_IN, OTHER_FORMS, family_of, register_family
from tests.support.tiny_models import save_tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
PROGRAM = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from millrace.connectors.engines.embedded.model import Decoder, Weights, read_shape, read_tensors
from millrace.connectors.trainers.megatron.weights.hf_mapping import lookup
from pathlib import Path

folder, twin = Path(sys.argv[1]), sys.argv[2]
shape = read_shape(folder)
decoder = Decoder(Weights(shape, read_tensors(folder, shape, None)))
tokens = torch.arange(16)[None] % shape.vocab
hidden, _, _ = decoder.prefill(tokens)
with torch.no_grad():
    theirs = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)(tokens).logits[0]
print("logits", float((decoder.logits(hidden[0]) - theirs).abs().max()))
print("names", *lookup("decoder.layers.0.mlp.linear_fc1.weight", shape, layer_offset=1, expert_offset=0).names)
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The page's package, installed in a folder."""
    (program,) = re.findall(r"```python\n(# other_family.py\n.*?)```", PAGE, flags=re.S)
    (entry,) = re.findall(
        r"```toml\n\[project.entry-points.\"millrace.families\"\]\n(.*?)```", PAGE, flags=re.S
    )
    (tmp_path / "site" / "other-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "other_family.py").write_text(program)
    information = tmp_path / "site" / "other-1.0.dist-info"
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[millrace.families]\n" + entry.replace('"', ""))
    return tmp_path / "site"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for name in {*registry._known} - {family.name for family in (*BUILT_IN, *OTHER_FORMS)}:
        del registry._known[name]


def test_a_process_finds_the_family_of_a_package_and_computes_what_its_twin_does(
    other: Path, tmp_path: Path
) -> None:
    """The twin is the Qwen3 of transformers with the same weights, which has the same layers under other names."""
    from safetensors.torch import load_file, save_file

    twin = save_tiny_model(tmp_path / "twin", "qwen3", 37)
    folder = tmp_path / "other"
    folder.mkdir()
    tensors = load_file(twin / "model.safetensors")
    save_file(
        {name.replace(".mlp.", ".ffn."): value for name, value in tensors.items()},
        folder / "model.safetensors",
    )
    config = json.loads((twin / "config.json").read_text())
    for key in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
        config.pop(key, None)
    config |= {"model_type": "other", "architectures": ["OtherForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, twin],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(other), *sys.path])},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert float(said["logits"]) < 1e-5
    assert said["names"] == "model.layers.1.ffn.gate_proj.weight model.layers.1.ffn.up_proj.weight"


def test_a_registered_family_is_read_and_its_name_stays_its_own() -> None:
    mine = replace(LLAMA, name="mine", title="Mine")
    assert family_of("mine") is None
    register_family(mine)
    register_family(mine)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    config = {"model_type": "mine", "vocab_size": 5, "hidden_size": 4, "intermediate_size": 3, **sizes}
    assert architecture(resolved(config, "test")).family == "mine"
    with pytest.raises(ConfigError, match="another family has this name"):
        register_family(replace(LLAMA, title="Mine"))


def test_an_entry_point_that_is_no_family_is_named(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (other / "other_family.py").write_text("OTHER = 3\n")
    monkeypatch.syspath_prepend(other)
    with pytest.raises(ConfigError, match="other_family:OTHER is no Family of this name"):
        family_of("other")


def test_a_key_has_one_meaning() -> None:
    with pytest.raises(AssertionError, match="'vocab_size'. has two meanings"):
        replace(LLAMA, harmless=LLAMA.harmless | {"vocab_size"})
