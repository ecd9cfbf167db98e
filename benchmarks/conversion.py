"""Memory and time of converting a checkpoint of a given shape both ways; the torch_dist one is cut as two by two ranks save it.

Peak memory of the process that converts, against a rank's share of the weights; JSON to stdout, a table to stderr.

    python -m benchmarks.conversion [--layers 16] [--hidden 2048] [--ffn 8192] [--vocab 128256] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TARGET = 1.3
TENSOR, PIPELINE = 2, 2
HEADS, KV_HEADS, HEAD = 32, 8, 64
PROGRAM = """
import json, sys
from pathlib import Path
from millrace.connectors.trainers.megatron.conversion.conversion import Conversion, Order

def peak():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024

source, target, model = (Path(word) if word else None for word in sys.argv[1:])
before = peak()
conversion = Conversion(Order(source, target, model))
conversion.convert()
conversion.verify()
print(json.dumps([before, peak()]))
"""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument(
        "--folder", help="where the checkpoints are made, and removed; three times the model's size"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report = measure(options, Path(folder))
    show(report)
    print(json.dumps(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the model, convert it there and back; each conversion is compared bit for bit too."""
    size = make_model(options, folder / "model")
    save_as_ranks(folder / "model", folder / "ranks")
    report: dict[str, Any] = {
        "benchmark": "conversion",
        "command": " ".join(["python -m benchmarks.conversion", *sys.argv[1:]]),
        "bytes": size,
        "share": size // (TENSOR * PIPELINE),
        "target": TARGET,
    }
    ways = {"hf to torch_dist": ("model", ""), "torch_dist to hf": ("ranks", "model")}
    for number, (way, (source, model)) in enumerate(ways.items()):
        words = [folder / source, folder / f"made{number}", folder / model if model else ""]
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, words)], capture_output=True, text=True, check=True
        )
        before, peak = json.loads(done.stdout.splitlines()[-1])
        report[way] = {
            "seconds": time.perf_counter() - started,
            "peak": peak,
            "program": before,
            "of_share": peak / report["share"],
        }
    return report


def make_model(options: argparse.Namespace, folder: Path) -> int:
    """Write a tied Llama of this shape with random weights in bfloat16, a file a layer; returns its bytes."""
    import torch
    from safetensors.torch import save_file

    from millrace.core.families.architecture import architecture
    from millrace.core.families.config_file import read_hf_config
    from millrace.core.families.tensors import INDEX, tensor_shapes

    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "intermediate_size": options.ffn,
        "num_hidden_layers": options.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes, files = tensor_shapes(architecture(read_hf_config(str(folder)))), dict[str, str]()
    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else "outer"
        files[name] = f"model-{layer}.safetensors"
    size = 0
    for file in sorted(set(files.values())):
        tensors = {name: torch.randn(shapes[name]).bfloat16() for name, held in files.items() if held == file}
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": files}))
    return size


def save_as_ranks(model: Path, folder: Path) -> None:
    """Write the model as torch_dist, in the chunks and files of two tensor parallel ranks on each of two stages."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    from millrace.connectors.trainers.megatron.conversion.parameters import parameters
    from millrace.core.families.architecture import architecture
    from millrace.core.families.config_file import read_hf_config
    from millrace.core.families.folder_tensors import FolderTensors

    folder.mkdir()
    arch = architecture(read_hf_config(str(model)))
    tensors, contents = FolderTensors(str(model), arch), metadata.Metadata({}, storage_data={})
    for parameter in parameters(arch):
        place, part = parameter.own_place(arch), parameter.part
        sizes = (*(arch.layers for _ in place.axes), *parameter.shape)
        held = metadata.TensorStorageMetadata(
            metadata.TensorProperties(torch.bfloat16), torch.Size(sizes), []
        )
        tensor = contents.state_dict_metadata.setdefault(place.keys[0], held)
        assert isinstance(tensor, metadata.TensorStorageMetadata)
        stage = parameter.layer * PIPELINE // arch.layers
        made = [tensors[name] for name in parameter.shapes]
        for rank in range(TENSOR if part.split is not None else 1):
            local = parameter.mapping.local(made, arch, rank, TENSOR, arch.vocab)
            halves = local.chunk(2) if part.form == "pair" else [local]
            for number, half in enumerate(halves):
                offsets = [*place.index, *(0 for _ in parameter.shape)]
                if part.split is not None:
                    offsets[len(place.index) + part.split] = (number * TENSOR + rank) * half.shape[part.split]
                chunk = half.clone().reshape(*(1 for _ in place.index), *half.shape)
                at = torch.Size(offsets)
                file = folder / f"__{stage * TENSOR + rank}_0.distcp"
                with file.open("ab") as stream:
                    start = stream.tell()
                    torch.save(chunk, stream)
                    stored = filesystem._StorageInfo(file.name, start, stream.tell() - start)
                contents.storage_data[metadata.MetadataIndex(place.keys[0], at, len(tensor.chunks))] = stored
                tensor.chunks.append(metadata.ChunkStorageMetadata(at, chunk.shape))
    (folder / ".metadata").write_bytes(pickle.dumps(contents))


def show(report: dict[str, Any]) -> None:
    """The figures as a table."""
    mib = 2**20
    table = Table(
        title=f"{report['bytes'] / mib:.0f} MiB of weights, {report['share'] / mib:.0f} MiB a rank of {TENSOR} × {PIPELINE}"
    )
    for name in ("way", "seconds", "program alone", "peak", "of a rank's share"):
        table.add_column(name)
    for way in ("hf to torch_dist", "torch_dist to hf"):
        row = report[way]
        cells = (f"{row['program'] / mib:.0f} MiB", f"{row['peak'] / mib:.0f} MiB", f"{row['of_share']:.2f}")
        table.add_row(way, f"{row['seconds']:.0f}", *cells)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
