"""Caches in MILLRACE_HOME which tokenizer class transformers chooses for a model's folder.

To choose it, transformers imports torch, scikit-learn and pandas: 400 MiB, and more than half of a driver's start time. The choice
depends only on the folder's small files and the installed versions, so only a new folder needs the imports.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from millrace.connectors.host.local_files import home, write_whole

READ_FILES = ("config.json", "tokenizer_config.json")
LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "mistral-common", "torch")
# only transformers' classes: code in a model's folder is not installed, and may change
KIND = re.compile(r"transformers\.[\w.]+:\w+")
KEPT = 100  # newest records


def remembered_kind(folder: str) -> str | None:
    """The class chosen for these files and versions, as `module:class`; None if it is not cached."""
    record = _record(folder)
    if record is None:
        return None
    try:
        kind = record.read_text()
    except FileNotFoundError:
        return None
    # the caller imports this name, so accept only what remember_kind writes
    return kind if KIND.fullmatch(kind) else None


def remember_kind(folder: str, kind: str) -> None:
    """Store the class for later processes."""
    record = _record(folder)
    if record is None or not KIND.fullmatch(kind):
        return
    write_whole(record, [kind.encode()])
    newest = sorted(record.parent.glob("[!.]*"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in newest[KEPT:]:
        old.unlink(missing_ok=True)


def _record(folder: str) -> Path | None:
    """The cache's file; None if the folder is not on this host, since transformers would look for the name on the Hub."""
    path = Path(folder)
    if not path.is_dir():
        return None
    settled_by = {
        "versions": [_version(name) for name in LIBRARIES],
        # transformers recognises some models by the start of their names; an absolute path never matches
        "name": "" if path.is_absolute() else folder,
        "files": sorted(each.name for each in path.iterdir() if each.is_file()),
        "contents": [_hash(path / name) for name in READ_FILES],
    }
    key = hashlib.sha256(json.dumps(settled_by).encode()).hexdigest()
    return home() / "tokenizers" / key


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _hash(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
