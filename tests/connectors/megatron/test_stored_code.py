"""What is stored is data: a file that names code is refused, whatever its format, and nothing that it names runs.

A checkpoint's table of contents, objects among its tensors and records of tasks ran what they named; a model's folder did
so after a question on the terminal.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.results import ResultStore
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import millrace
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.prefect.record_storage import PLAIN, RecordStorage
from millrace.connectors.storage.store import Store
from millrace.connectors.trainers.checkpoint.stored_metadata import KNOWN, read_metadata
from millrace.core.config.model import Model
from millrace.core.errors import ConfigError, CorruptFileError
from tests.support.trainer_ranks import RankFailedError, Workers, configuration


class Opens:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def saved_by_torch(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def rewritten(folder: Path, change: Callable[[Metadata], None]) -> None:
    """The table of contents, changed."""
    path = folder / ".metadata"
    contents = pickle.loads(path.read_bytes())  # noqa: S301 - the test's own
    change(contents)
    path.write_bytes(pickle.dumps(contents))


def points_to(folder: Path, key: str, value: bytes, as_bytes: bool) -> None:
    """Put an object behind a rank's tensors, and have the table of contents say that a tensor lies there."""
    shard = folder / "__0_0.distcp"
    start = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + value)

    def change(contents: Metadata) -> None:
        name = next(name for name in contents.state_dict_metadata if name.startswith(key))
        places = contents.storage_data
        place = next(place for place in places if place.fqn == name)
        moved = replace(places[place], offset=start, length=len(value))
        if as_bytes:
            contents.state_dict_metadata[name] = BytesStorageMetadata()
            places[replace(place, offset=None, index=None)] = moved
        places[place] = moved

    rewritten(folder, change)


def whole_metadata(folder: Path, poison: Opens) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(poison))


def within_metadata(folder: Path, poison: Opens) -> None:
    rewritten(folder, lambda contents: setattr(contents, "planner_data", poison))


def weights(folder: Path, poison: Opens) -> None:
    points_to(folder, "decoder.final_layernorm", saved_by_torch(poison), as_bytes=False)


def weights_as_an_object(folder: Path, poison: Opens) -> None:
    points_to(folder, "decoder.final_layernorm", saved_by_torch(poison), as_bytes=True)


def optimizer_state(folder: Path, poison: Opens) -> None:
    points_to(folder, "optimizer.state.exp_avg.", saved_by_torch(poison), as_bytes=False)


def optimizer_state_as_an_object(folder: Path, poison: Opens) -> None:
    points_to(folder, "optimizer.state.exp_avg.", saved_by_torch(poison), as_bytes=True)


def common_state(folder: Path, poison: Opens) -> None:
    torch.save({"rng": poison}, folder / "common.pt")


def a_file_elsewhere(folder: Path, poison: Opens) -> None:
    (folder.parent / "elsewhere").write_bytes(saved_by_torch(poison))

    def change(contents: Metadata) -> None:
        for place, held in contents.storage_data.items():
            contents.storage_data[place] = replace(held, relative_path="../elsewhere")

    rewritten(folder, change)


CHECKPOINTS = {
    each.__name__: each
    for each in (
        whole_metadata,
        within_metadata,
        weights,
        weights_as_an_object,
        optimizer_state,
        optimizer_state_as_an_object,
        common_state,
        a_file_elsewhere,
    )
}


@pytest.fixture(scope="module")
def saved(
    workers: Workers, model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A checkpoint, and what loads one into ranks that are there already."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    with workers.group(configuration(model())) as group:
        group.call("save", str(folder))
        yield folder, lambda url: group.call("load", str(url))


def signed_anew(folder: Path) -> None:
    """The marker with the hashes of the files that are there, as anyone can write it who can write the folder."""
    store = Store(str(folder))
    marker = store.read_sealed("complete.json")
    entries = store.entries([file["path"] for file in marker["files"]])
    files = [entry.model_dump(include={"path", "size", "sha256"}) for entry in entries]
    store.write_sealed("complete.json", {**marker, "files": files})


@pytest.mark.parametrize("where", CHECKPOINTS)
def test_a_checkpoint_that_names_code_is_refused_and_runs_nothing(
    saved: tuple[Path, Callable[[Path], None]], tmp_path: Path, where: str
) -> None:
    whole, load = saved
    folder = tmp_path / "checkpoint"
    shutil.copytree(whole, folder)
    signed_anew(folder)
    load(folder)
    CHECKPOINTS[where](folder, Opens(tmp_path / "it ran"))
    signed_anew(folder)
    with pytest.raises(RankFailedError, match="(CorruptFileError|TrainerError): .*load another"):
        load(folder)
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.exec", "torch.load", "torch.distributed.checkpoint.metadata.Metadata.__init__"],
)
def test_a_table_of_contents_is_made_of_what_is_listed(tmp_path: Path, name: str) -> None:
    module, _, attribute = name.partition(".") if name.count(".") == 1 else name.partition(".Metadata")
    if name.endswith("__init__"):
        attribute = "Metadata.__init__"
    stream = (
        pickle.PROTO
        + b"\x04"
        + b"".join(
            pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, attribute)
        )
    )
    (tmp_path / ".metadata").write_bytes(stream + pickle.STACK_GLOBAL + pickle.STOP)
    with pytest.raises(CorruptFileError, match="no part of a checkpoint"):
        read_metadata(tmp_path, [])


def test_nothing_that_is_listed_does_more_than_hold_values() -> None:
    called = {key for key, value in KNOWN.items() if not isinstance(value, type | torch.dtype | torch.layout)}
    assert called == {("torch.serialization", "_get_layout")}


async def test_a_tasks_record_is_read_as_plain_json_whatever_it_says_of_itself(tmp_path: Path) -> None:
    """It named how it is read: as a pickle, by any module, or as any class."""
    import base64

    storage = RecordStorage(root=str(tmp_path / "runs"))
    blob = base64.encodebytes(pickle.dumps(Opens(tmp_path / "it ran"))).decode()
    named = json.dumps({"__class__": "pathlib.Path", "data": str(tmp_path)})
    records: list[dict[str, Any]] = [
        {"metadata": {"serializer": {"type": "pickle"}}, "result": blob},
        {"metadata": {"serializer": {"type": "compressed/pickle"}}, "result": blob},
        {"metadata": {}, "serializer": {"type": "pickle"}, "result": blob},
        {"metadata": {}, "result": blob},
        {"data": blob, "serializer": {"type": "pickle"}},
        {"metadata": {"serializer": {"type": "json", "jsonlib": "pickle"}}, "result": blob},
        {"metadata": {"serializer": {"type": "json"}}, "result": named},
        {"result": {"__class__": "pathlib.Path", "data": str(tmp_path)}},
    ]
    results = ResultStore(result_storage=storage, serializer=PLAIN)
    read = []
    for number, record in enumerate(records):
        Store(str(tmp_path / "runs" / "a")).write_sealed(f"results/{number}.json", record)
        try:
            read.append((await results.aread(f"a/results/{number}.json")).result)
        except (CorruptFileError, ValueError):
            continue
    assert not (tmp_path / "it ran").exists()
    assert read == [json.loads(named)]


def test_a_models_folder_runs_no_code_though_one_says_yes_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own"}))
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = tmp_path / "it ran"
    (tmp_path / "tokenization_own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        PromptTokenizer.load(Model(path=str(tmp_path)))
    assert not ran.exists()


# Every call of the package that could make objects of what is stored, and why it does not run what a file names.
OWN_PROCESS = "bytes of a process that this one started, or that started it"
READS = {
    ("connectors/trainers/checkpoint/background.py", "pickle.loads"): OWN_PROCESS,
    ("connectors/trainers/checkpoint/write_process.py", "pickle.load"): OWN_PROCESS,
    ("connectors/engines/sglang/wire/bucket_payload.py", "pickle.loads"): OWN_PROCESS,
    ("connectors/user_code/pool.py", "pickle.loads"): OWN_PROCESS,
    ("connectors/ray/actors.py", "cloudpickle.loads"): OWN_PROCESS,
    ("connectors/user_code/process.py", "pickle.loads"): OWN_PROCESS,
    ("core/families/template_process.py", "pickle.loads"): OWN_PROCESS,
    (
        "connectors/trainers/checkpoint/stored_metadata.py",
        "pickle.Unpickler",
    ): "finds what is listed",
    ("connectors/trainers/checkpoint/stored_metadata.py", "torch.load"): "weights_only",
    ("connectors/trainers/megatron/conversion/stored_weights.py", "torch.load"): "weights_only",
    ("connectors/trainers/megatron/torch_dist.py", "dist_checkpointing.load"): "read as data",
    ("connectors/engines/embedded/weight_routes.py", "load_safetensors"): "safetensors",
    ("connectors/engines/embedded/by_transformers.py", "load_file"): "safetensors",
    ("connectors/huggingface/tiny_vision.py", "load_file"): "safetensors",
    ("core/families/folder_tensors.py", "safe_open"): "safetensors",
    ("core/families/peft_folder.py", "safe_open"): "safetensors",
    ("core/families/weight_files.py", "safe_open"): "safetensors",
    ("flows/commands/replay.py", "load_file"): "safetensors",
    ("core/config/reading/yaml_text.py", "yaml.load"): "a SafeLoader",
}
PLAIN_FORMATS = ("json", "pq", "pa.ipc")
MAKES = ("load", "loads", "load_file", "load_safetensors", "safe_open", "Unpickler", "load_state_dict")


def reads_of(source: str) -> Iterator[str]:
    """Calls and base classes of a module that make objects of bytes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            owner, _, last = name.rpartition(".")
            makes = last in MAKES and (owner.split(".")[0] in LIBRARIES or not owner)
            if makes and not (last in ("load", "loads", "load_state_dict") and not owner):
                yield name
        elif isinstance(node, ast.ClassDef):
            yield from (ast.unparse(base) for base in node.bases if ast.unparse(base).endswith("Unpickler"))


LIBRARIES = (
    "pickle",
    "cloudpickle",
    "torch",
    "numpy",
    "np",
    "joblib",
    "dill",
    "marshal",
    "shelve",
    "yaml",
    "dist_checkpointing",
)


def test_every_call_that_makes_objects_of_stored_bytes_has_a_row() -> None:
    root = Path(millrace.__file__).parent
    found = {
        (path.relative_to(root).as_posix(), name)
        for folder in ("core", "connectors", "tasks", "flows")
        for path in (root / folder).rglob("*.py")
        for name in reads_of(path.read_text())
    }
    assert found == set(READS)


def test_every_tokenizer_and_model_of_a_folder_is_loaded_without_the_folders_code() -> None:
    root = Path(millrace.__file__).parent
    calls = [
        (path.name, node)
        for folder in ("core", "connectors", "tasks", "flows")
        for path in (root / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(".from_pretrained")
        and ast.unparse(node.func).startswith("Auto")
    ]
    assert len(calls) == 9
    for name, call in calls:
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("trust_remote_code") == "False" or "gguf_file" in given, name
