"""Checkpoints between Hugging Face's form and torch_dist: whatever layout of ranks wrote them, killed, flipped and refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millrace.connectors.trainers.megatron.conversion.conversion import RECORD, Conversion, Order
from millrace.connectors.trainers.megatron.conversion.parameters import Parameter, parameters
from millrace.connectors.trainers.megatron.conversion.stored_weights import common_arguments
from millrace.core.errors import ConfigError, CorruptFileError, MillraceError, StorageError
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.registry import BUILT_IN
from millrace.core.families.weight_files import INDEX
from tests.support.tiny_models import save_mxfp4_model
from tests.support.trainer_ranks import Workers, configuration

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SMALL = 30_000  # bytes of a file, so that there are several
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3": (4, {"tensor": 2, "pipeline": 2}),
    "qwen2_moe": (2, {"tensor": 2, "expert": 2, "sequence": True}),
    "qwen3_next": (4, {"tensor": 2, "pipeline": 2, "sequence": True}),
}
TIED = {"qwen3": True, "qwen2_moe": False, "qwen3_next": False}


def convert(source: Path, target: Path, model: Path | None = None, **options: Any) -> Conversion:
    """Converted, compared."""
    made = Conversion(Order(source, target, model, **{"file_bytes": SMALL, **options}))
    made.convert()
    made.verify()
    return made


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same(folder: Path, wanted: Path) -> None:
    found, original = tensors_of(folder), tensors_of(wanted)
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def load_weights(rank: Any, folder: str) -> list[str]:
    """Load a converted checkpoint with megatron-core; names of the parameters that are not the model's."""
    from megatron.core import dist_checkpointing

    inner, vocab = rank.learner.policy.inner, rank.learner.architecture.vocab
    wanted = {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.zero_()
    inner.load_state_dict(dist_checkpointing.load({"model": inner.sharded_state_dict()}, folder)["model"])
    differing = []
    for name, parameter in inner.named_parameters():
        # a layout adds rows that no token has
        vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        rows = len(parameter) - (len(parameter) * 2 - vocab if vocabulary else 0)
        if not torch.equal(parameter[:rows], wanted[name][:rows]):
            differing.append(name)
    return differing


@pytest.fixture(scope="module", params=list(LAYOUTS))
def written(
    request: pytest.FixtureRequest,
    workers: Workers,
    model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """A model, what ranks of a layout saved of it, what conversion made of it, and what the ranks did not read of that."""
    world, parallel = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("written")
    source = model(request.param, tie_word_embeddings=TIED[request.param])
    convert(source, folder / "converted")
    with workers.group(configuration(source, world, parallel=parallel)) as group:
        group.call("save", f"{folder}/saved")
        differing = group.run(load_weights, str(folder / "converted" / "release"))
    return {
        "model": source,
        "saved": folder / "saved",
        "converted": folder / "converted",
        "differing": differing,
    }


def test_what_ranks_of_any_layout_saved_is_the_model_again(written: dict[str, Any], tmp_path: Path) -> None:
    convert(written["saved"], tmp_path / "again", written["model"])
    assert_same(tmp_path / "again", written["model"])
    index = json.loads((tmp_path / "again" / INDEX).read_text())
    tensors = tensors_of(tmp_path / "again")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "again" / file)


def test_ranks_of_any_layout_load_what_was_converted(written: dict[str, Any]) -> None:
    assert not any(written["differing"])


STACKED = [family.name for family in BUILT_IN if any(part.stacked and not part.when for part in family.layer)]


@pytest.mark.parametrize("family", STACKED)
def test_experts_that_are_stored_together_stay_in_hugging_faces_form(
    family: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="hold all experts of a layer, which torch_dist keeps apart"):
        Conversion(Order(model(family), tmp_path / "there"))
    convert(model(family), tmp_path / "back", to="hf")
    assert_same(tmp_path / "back", model(family))


def test_quantised_experts_become_bfloat16(tmp_path: Path) -> None:
    source = save_mxfp4_model(tmp_path / "model", 37)
    convert(source, tmp_path / "made", to="hf", dtype=torch.bfloat16)
    tensors = FolderTensors(str(source), architecture(read_hf_config(str(source))))
    found = tensors_of(tmp_path / "made")
    assert sorted(found) == sorted(tensors.stored)
    assert all(torch.equal(tensor, tensors[name].bfloat16()) for name, tensor in found.items())
    assert "quantization_config" not in json.loads((tmp_path / "made" / "config.json").read_text())


@pytest.mark.parametrize("family", [family.name for family in BUILT_IN if family.name not in STACKED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_every_familys_tensors_are_the_same(
    family: str, dtype: torch.dtype, model: Callable[..., Path], tmp_path: Path
) -> None:
    source = model(
        family, dtype=str(dtype).removeprefix("torch."), tie_word_embeddings=dtype == torch.float32
    )
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling_own.py").write_text("class Own: ...\n")
    convert(source, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back")
    assert_same(tmp_path / "back", source)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "modeling_own.py"):
        found, original = ((folder / name).read_text() for folder in (tmp_path / "back", source))
        assert (json.loads(found) == json.loads(original)) if name.endswith(".json") else found == original


@pytest.mark.parametrize(
    ("family", "layer", "keys"),
    [("deepseek_v3", "model.layers.2", {"num_nextn_predict_layers": 1}), ("qwen3_next", "mtp.layers.0", {})],
)
def test_layers_that_predict_further_tokens_come_back_unchanged(
    model: Callable[..., Path], tmp_path: Path, family: str, layer: str, keys: dict[str, int]
) -> None:
    """megatron's model has none: they lie beside it, or in the folder that describes it."""
    source = shutil.copytree(model(family), tmp_path / "source")
    _set(source, **keys)
    more = {
        f"{layer}.{name}.weight": torch.randn(size).bfloat16()
        for name, size in {"eh_proj": (8, 16), "enorm": (8,), "mlp.experts.3.up_proj": (4, 8)}.items()
    }
    save_file({**tensors_of(source), **more}, source / "model.safetensors")
    convert(source, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back")
    assert_same(tmp_path / "back", source)
    shutil.rmtree(tmp_path / "there" / "hugging_face")
    convert(tmp_path / "there", tmp_path / "described", source)
    assert_same(tmp_path / "described", source)


def test_layers_of_several_types_need_one_to_be_asked_for(model: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(model(), tmp_path / "source")
    tensors = tensors_of(source)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].bfloat16()}, source / "model.safetensors")
    with pytest.raises(
        ConfigError, match="linear_fc2.weight would be of types bfloat16, float32; .* --dtype"
    ):
        convert(source, tmp_path / "made")
    convert(source, tmp_path / "made", dtype=torch.float32)


def test_a_type_is_asked_for(model: Callable[..., Path], tmp_path: Path) -> None:
    convert(model(), tmp_path / "half", to="hf", dtype=torch.bfloat16)
    wanted = {name: t.to(torch.bfloat16) for name, t in tensors_of(model()).items()}
    found = tensors_of(tmp_path / "half")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


# as Megatron-LM and slime write it


def megatron_keys(parameter: Parameter, form: str) -> tuple[str, tuple[int, ...]]:
    """A parameter's name and the index in it, in each form that megatron-core writes."""
    name = parameter.part.parameter
    experts = (".experts.experts.", (parameter.expert,)) if "{expert}" in name else ("", ())
    if form == "numbered":
        name = name.replace("local_experts.{expert}", "experts.{expert}")
        return name.format(layer=parameter.layer, expert=parameter.expert), ()
    if form == "transformer engine":
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if "moe" not in form and ".experts" not in name:
            name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    layers = (parameter.layer,) if "{layer}" in name else ()
    name = name.replace(".layers.{layer}.", ".layers.").replace(
        ".experts.local_experts.{expert}.", experts[0]
    )
    return name, (*layers, *experts[1])


def save_as_megatron(source: Path, folder: Path, form: str, arguments: Any = None) -> Path:
    """Write the model of a folder with PyTorch's own writer, as an iteration of Megatron-LM."""
    import torch.distributed.checkpoint as dcp

    arch = architecture(read_hf_config(str(source)))
    tensors, state = tensors_of(source), dict[str, Any]()
    for parameter in parameters(arch):
        whole = parameter.mapping.local([tensors[name] for name in parameter.shapes], arch, 0, 1, 128)
        key, index = megatron_keys(parameter, form)
        if form == "halves" and parameter.part.form == "pair":
            for half, part in zip("wv", whole.chunk(2), strict=True):
                state.setdefault(f"{key}_{half}", {})[index] = part
        else:
            state.setdefault(key, {})[index] = whole
    stacked = {}
    for key, parts in state.items():
        depth = len(next(iter(parts)))
        sizes = [max(index[axis] for index in parts) + 1 for axis in range(depth)]
        stacked[key] = torch.stack([parts[index] for index in sorted(parts)]).reshape(
            *sizes, *next(iter(parts.values())).shape
        )
    stacked["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(3)
    iteration = folder / "iter_0000012"
    iteration.mkdir(parents=True)
    dcp.save(stacked, checkpoint_id=iteration, no_dist=True)
    torch.save({"args": arguments, "iteration": 12}, iteration / "common.pt")
    (iteration / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    return folder


@pytest.mark.parametrize("form", ["plain", "transformer engine", "numbered", "halves"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_megatrons_own_checkpoints_are_read_in_each_form(
    form: str, family: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = Namespace(
        num_layers=2, num_attention_heads=4, hidden_size=32, attention_backend=signal.SIGINT
    )
    saved = save_as_megatron(model(family), tmp_path / "megatron", form, arguments)
    convert(saved, tmp_path / "again", model(family))
    assert_same(tmp_path / "again", model(family))


class Own:
    """A class that common.pt names; a reader that imports it makes a file."""

    def __reduce__(self) -> Any:
        return exec, ("import pathlib; pathlib.Path('it ran').touch()",)


def test_arguments_are_read_without_their_classes_and_code_in_them_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"args": Namespace(num_layers=2, own=Own(), kind=signal.SIGINT)}, tmp_path / "common.pt")
    assert common_arguments(tmp_path)["num_layers"] == 2
    (tmp_path / "common.pt").write_bytes(pickle.dumps(Own()))
    with pytest.raises(CorruptFileError, match=r"common.pt: it is not read: .*; remove it"):
        common_arguments(tmp_path)
    assert not (tmp_path / "it ran").exists()
    (tmp_path / "common.pt").unlink()
    assert common_arguments(tmp_path) == {}


# killed, flipped and refused

KILLED = """
import os, signal, sys
from pathlib import Path
from millrace.connectors.trainers.megatron.conversion.conversion import RECORD, Conversion, Order

made = Conversion(Order(Path(sys.argv[1]), Path(sys.argv[2]), file_bytes=30_000))
read = made.source.tensors

def killed(parameter, rows):
    if parameter.name == "decoder.layers.1.mlp.linear_fc2.weight":
        os.kill(os.getpid(), signal.SIGKILL)
    return read(parameter, rows)

made.source.tensors = killed
made.convert()
"""


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the record."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != RECORD]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("to", ["torch_dist", "hf"])
def test_killed_half_way_it_goes_on_from_its_whole_files(
    to: Any, model: Callable[..., Path], tmp_path: Path
) -> None:
    source = model()
    if to == "hf":
        convert(source, tmp_path / "source")
        source = tmp_path / "source"
    done = subprocess.run([sys.executable, "-c", KILLED, source, tmp_path / "killed"], check=False)
    assert done.returncode == -signal.SIGKILL
    record = json.loads((tmp_path / "killed" / RECORD).read_text())
    (first, second), whole = sorted(record["files"]), tmp_path / "whole"
    assert len(contents(tmp_path / "killed")) == 3  # and what was being written
    assert not record["complete"]
    written = (tmp_path / "killed" / first).stat().st_mtime_ns
    flipped = bytearray((tmp_path / "killed" / second).read_bytes())
    flipped[-1] ^= 1
    (tmp_path / "killed" / second).write_bytes(flipped)

    assert convert(source, tmp_path / "killed").folder.exists()
    assert (tmp_path / "killed" / first).stat().st_mtime_ns == written
    convert(source, whole)
    killed, uninterrupted = contents(tmp_path / "killed"), contents(whole)
    assert killed.keys() == uninterrupted.keys()
    assert {name for name in killed if killed[name] != uninterrupted[name]} == set()


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("to", ["torch_dist", "hf"])
def test_a_flipped_bit_is_found(to: Any, model: Callable[..., Path], tmp_path: Path) -> None:
    made = convert(model(), tmp_path / "made", to=to, file_bytes=2**30)
    assert made.convert().kept == 1  # which is not written again
    name = "release/__0_0.distcp" if to == "torch_dist" else "model.safetensors"
    place = (
        (tmp_path / "made" / name)
        .read_bytes()
        .rfind(tensors_of(model())["model.norm.weight"].numpy().tobytes())
    )
    flip(tmp_path / "made" / name, place)
    with pytest.raises(CorruptFileError, match=r"model.norm.weight is not the source's; remove the target"):
        Conversion(Order(model(), tmp_path / "made", to=to, file_bytes=2**30)).verify()
    shutil.rmtree(tmp_path / "made")
    convert(model(), tmp_path / "made", to=to, file_bytes=2**30).verify()


def test_a_checkpoint_of_the_trainer_is_checked_by_its_hashes(
    written: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(written["saved"], tmp_path / "saved")
    flip(tmp_path / "saved" / "__0_0.distcp", 900)
    with pytest.raises(CorruptFileError, match="__0_0.distcp: its sha256 is"):
        Conversion(Order(tmp_path / "saved", tmp_path / "made", written["model"]))


def _older_format(folder: Path, _: Path) -> None:
    (folder / "saved" / "iter_0000012" / "mp_rank_00").mkdir()


def _other_format(folder: Path, _: Path) -> None:
    (folder / "saved" / "iter_0000012" / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')


def _no_iteration(folder: Path, _: Path) -> None:
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("13")


def _wrong_tracker(folder: Path, _: Path) -> None:
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("../..")


def _no_table(folder: Path, _: Path) -> None:
    (folder / "saved" / "iter_0000012" / ".metadata").unlink()


def _missing_file(folder: Path, _: Path) -> None:
    next((folder / "saved" / "iter_0000012").glob("*.distcp")).unlink()


def _layers(_: Path, model: Path) -> None:
    _set(model, num_hidden_layers=3, layer_types=["full_attention"] * 3)


def _tied(_: Path, model: Path) -> None:
    _set(model, tie_word_embeddings=True)


def _heads(_: Path, model: Path) -> None:
    # the same shapes of tensors
    _set(model, num_attention_heads=2, num_key_value_heads=1, head_dim=16)


def _family(_: Path, model: Path) -> None:
    _set(model, model_type="llama", architectures=["LlamaForCausalLM"])


def _set(model: Path, **values: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **values}))


def _file_there(folder: Path, _: Path) -> None:
    (folder / "made").write_text("")


def _not_empty(folder: Path, _: Path) -> None:
    (folder / "made").mkdir()
    (folder / "made" / "notes.txt").write_text("mine")


def _another_conversion(folder: Path, model: Path) -> None:
    convert(model, folder / "made", to="hf")


REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "the older format": (
        _older_format,
        "of the format torch, not torch_dist; write it again with --ckpt-format",
    ),
    "another format": (_other_format, "of the format fsdp_dtensor, not torch_dist; write it again"),
    "an iteration that is gone": (_no_iteration, "iter_0000013: no such folder; correct the path"),
    "a tracker of something else": (_wrong_tracker, "names neither an iteration nor release"),
    "no table of contents": (_no_table, "holds neither config.json nor .metadata"),
    "a missing file": (_missing_file, "which is not a file of the checkpoint; take a whole copy"),
    "fewer layers": (_layers, r"has shape \[2, .*, the model has \[3, .*--model"),
    "a tied model's configuration": (
        _tied,
        "tensor output_layer.weight belongs to no parameter of this qwen3",
    ),
    "other heads": (_heads, "common.pt says num_attention_heads = 4, and the model has 2"),
    "another family": (_family, "layernorm.weight belongs to no parameter of this llama"),
    "a file at the target": (_file_there, "made: a file is there; name a folder that does not exist"),
    "a folder of something else": (_not_empty, "made: it is not empty; name a folder that does not exist"),
    "a folder of another conversion": (
        _another_conversion,
        "made: it holds another conversion: source .*remove it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name(
    case: str, model: Callable[..., Path], tmp_path: Path
) -> None:
    change, reason = REFUSED[case]
    shutil.copytree(model(), tmp_path / "model")
    save_as_megatron(model(), tmp_path / "saved", "plain", Namespace(num_attention_heads=4))
    change(tmp_path, tmp_path / "model")
    before = contents(tmp_path)
    with pytest.raises(MillraceError, match=reason):
        Conversion(Order(tmp_path / "saved", tmp_path / "made", tmp_path / "model")).convert()
    assert contents(tmp_path) == before


def test_the_target_is_never_the_source_nor_in_it(model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model())
    for target in (model(), model() / "made", model().parent, tmp_path / "link"):
        with pytest.raises(ConfigError, match="one lies in the other; name a folder"):
            Conversion(Order(model(), target, to="hf"))


def test_a_torch_dist_source_needs_a_description(model: Callable[..., Path], tmp_path: Path) -> None:
    save_as_megatron(model(), tmp_path / "saved", "plain")
    with pytest.raises(ConfigError, match="no config.json and no tokenizer; name the Hugging Face folder"):
        Conversion(Order(tmp_path / "saved", tmp_path / "made"))


def test_a_source_that_changed_meanwhile_is_another_one(model: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(model(), tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "made")
    os.utime(tmp_path / "model" / "model.safetensors")
    with pytest.raises(StorageError, match="it holds another conversion: state"):
        convert(tmp_path / "model", tmp_path / "made")
    shutil.rmtree(tmp_path / "made")
    convert(tmp_path / "model", tmp_path / "made").verify()


def test_a_disk_without_room_is_seen_before_anything_is_written(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Namespace(free=50_000))
    with pytest.raises(StorageError, match=r"KiB are to be written, and its disk has 48.8 KiB free"):
        convert(model(), tmp_path / "made")
    assert contents(tmp_path / "made") == {}


def test_two_conversions_do_not_write_to_one_folder(model: Callable[..., Path], tmp_path: Path) -> None:
    first = Conversion(Order(model(), tmp_path / "made"))
    with first._alone(), pytest.raises(StorageError, match="another conversion writes to it; wait for it"):
        convert(model(), tmp_path / "made")


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_adapters_are_merged_in_fp32_and_rounded_once(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, kind: str
) -> None:
    from tests.connectors.megatron.test_adapters import EXPERTS, settings

    folder = model(kind)
    lora = {"rank": 4, "alpha": 12.0}
    with workers.group(settings(folder, targets=EXPERTS, lora=lora)) as group:
        group.train([1], batch.format(1))
        group.call("export", str(tmp_path / "adapters"), 1)
        group.call("save", str(tmp_path / "checkpoint"))
    convert(tmp_path / "adapters", tmp_path / "merged", to="hf", merge=True)
    convert(tmp_path / "adapters", tmp_path / "half", to="hf", merge=True, dtype=torch.bfloat16)
    convert(tmp_path / "adapters", tmp_path / "dist", to="torch_dist", merge=True)
    convert(tmp_path / "dist", tmp_path / "back")
    pairs = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    base, merged = tensors_of(folder), tensors_of(tmp_path / "merged")
    changed = 0
    for name, weight in base.items():
        a, b = (
            pairs.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight") for side in "AB"
        )
        wanted = weight if a is None or b is None else torch.addmm(weight, b, a, alpha=3.0)
        assert torch.equal(merged[name], wanted), name
        changed += a is not None
    assert changed == len(pairs) / 2 > 0
    assert_same(tmp_path / "back", tmp_path / "merged")
    with pytest.raises(ConfigError, match="it is a folder of adapters; add them to the weights.*--merge"):
        convert(tmp_path / "adapters", tmp_path / "other")
    with pytest.raises(ConfigError, match="it holds adapters alone.*--merge"):
        convert(tmp_path / "checkpoint", tmp_path / "other", folder)
    settings_file = tmp_path / "adapters" / "adapter_config.json"
    settings_file.write_text(settings_file.read_text().replace(str(folder), "/none"))
    with pytest.raises(ConfigError, match="/none holds no config.json.*--model"):
        convert(tmp_path / "adapters", tmp_path / "other", to="hf", merge=True)
    with pytest.raises(ConfigError, match="adapter_config.json cannot be read"):
        convert(folder, tmp_path / "other", to="hf", merge=True)


def test_merged_weights_of_a_type_are_those_that_the_runs_engines_get(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    """Weights stored in bfloat16 that a run holds in float32 were rounded to bfloat16 again when adapters had been added."""
    from tests.connectors.megatron.test_adapters import settings

    convert(model("qwen3"), tmp_path / "half", to="hf", dtype=torch.bfloat16)
    with workers.group(settings(tmp_path / "half")) as group:
        group.train([1], batch.format(1))
        group.call("export", str(tmp_path / "adapters"), 1)
        group.call("export", str(tmp_path / "served"), 1, True)
    convert(tmp_path / "adapters", tmp_path / "merged", to="hf", merge=True, dtype=torch.float32)
    served, merged = tensors_of(tmp_path / "served"), tensors_of(tmp_path / "merged")
    assert served.keys() == merged.keys()
    assert {tensor.dtype for tensor in served.values()} == {torch.float32}
    assert [name for name, tensor in served.items() if not torch.equal(tensor, merged[name])] == []
