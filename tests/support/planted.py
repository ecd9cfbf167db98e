"""Secrets that are planted in a run, the forms in which files and texts would hold one, and where one of them stands."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

import pyarrow.parquet as pq

from tests.support.flow_runs import Workplace

Secrets = Mapping[tuple[str, str], str]  # by kind, env or block, and field
SAVE = """
import json, sys
from prefect.blocks.system import Secret
for name, secret in json.load(sys.stdin).items():
    Secret(value=secret).save(name)
"""


def name_of(field: str) -> str:
    """A field as the name of a block."""
    return "".join(letter if letter.isalnum() else "-" for letter in field)


def variable(field: str) -> str:
    """The environment variable with a field's secret."""
    return f"PLANTED_{name_of(field).replace('-', '_').upper()}"


def forms(secret: str) -> Iterator[bytes]:
    """A secret as files and texts hold it."""
    texts = {
        secret,
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        json.dumps(secret)[1:-1],
        repr(secret)[1:-1],
    }
    for text in texts:
        yield text.encode()
    yield secret.encode("utf-16-le")
    for before in ("", "u", "us", "user:"):
        letters = base64.b64encode((before + secret).encode()).decode()
        yield letters[-(-len(before.encode()) * 8 // 6) : len((before + secret).encode()) * 8 // 6].encode()


def content(file: Path) -> bytes:
    """What a file holds, with the text of a table, which is compressed."""
    found = file.read_bytes()
    if file.suffix == ".parquet":
        found += json.dumps(pq.read_table(file).to_pydict(), default=str, ensure_ascii=False).encode()
    return found


def traces(secrets: Secrets, *folders: Path, said: list[str]) -> list[str]:
    """Where one of the secrets stands: a file below the folders, or what was printed; with its field and its form."""
    files = [
        file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()
    ]
    texts = {str(file): content(file) for file in files} | {"printed": "\n".join(said).encode()}
    return [
        f"{where}: that of {field} ({kind}) as {form!r}"
        for where, text in texts.items()
        for (kind, field), secret in secrets.items()
        for form in forms(secret)
        if form in text
    ]


def holds(folder: Path, reference: str) -> list[str]:
    """The names of files below a folder in which a reference stands."""
    return [file.name for file in folder.rglob("*") if file.is_file() and reference.encode() in content(file)]


def save_blocks(place: Workplace, secrets: Secrets) -> str:
    """Save the secrets of blocks on the workplace's Prefect server; returns what that printed."""
    saved = {name_of(field): secret for (kind, field), secret in secrets.items() if kind == "block"}
    login = {"PREFECT_API_URL": place.api, "PREFECT_API_AUTH_STRING": place.login}
    done = subprocess.run(
        [sys.executable, "-c", SAVE],
        input=json.dumps(saved),
        env={**place.environment, **login},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
