"""Which class of tokenizer transformers chooses for a model's folder, remembered in MILLRACE_HOME.

To choose it, transformers imports torch, scikit-learn and pandas: 400 MiB, and more than half of the seconds in which a driver
starts. A folder's small files and the installed versions settle the answer, so a process asks only for a folder that is new.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from millrace.connectors.storage.local import home, write_whole

READ_FILES = ("config.json", "tokenizer_config.json")
LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "mistral-common", "torch")
# a folder's own code is not installed, and may change
KIND = re.compile(r"transformers\.[\w.]+:\w+")
KEPT = 100  # records, the newest


def remembered_kind(folder: str) -> str | None:
    """The kind that was chosen for these files under these versions, as `module:class`; None if no process has asked yet."""
    record = _record(folder)
    if record is None:
        return None
    try:
        kind = record.read_text()
    except FileNotFoundError:
        return None
    # what is named is imported: nothing but what remember_kind may have written
    return kind if KIND.fullmatch(kind) else None


def remember_kind(folder: str, kind: str) -> None:
    """Keep the answer for later processes."""
    record = _record(folder)
    if record is None or not KIND.fullmatch(kind):
        return
    write_whole(record, [kind.encode()])
    newest = sorted(record.parent.glob("[!.]*"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in newest[KEPT:]:
        old.unlink(missing_ok=True)


def _record(folder: str) -> Path | None:
    """Where the answer is kept; None if the folder is not on this host, and transformers would look for a name on the Hub."""
    path = Path(folder)
    if not path.is_dir():
        return None
    settled_by = {
        "versions": [_version(name) for name in LIBRARIES],
        # transformers knows some models by the beginning of their names, which no absolute path has
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
