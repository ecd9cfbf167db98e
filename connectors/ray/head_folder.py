"""The place and name of the local head's folder. Knows nothing of the head's processes."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from millrace.connectors.host.local_files import PRIVATE_FOLDER, home
from millrace.core.errors import ConfigError

SOCKET_BYTES = 107  # Linux's bound on a socket's path
RAYS = "r"  # Ray's folder inside the head's; Ray makes it accessible to all users, the head's stays private
SOCKET = f"/{RAYS}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # the longest path


def parent() -> Path:
    """The parent of heads' folders."""
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")).absolute()


def prefix() -> str:
    """The prefix of this home's head folders, by which a head without a usable record is found."""
    whose = f"{os.getuid()}:{home().absolute()}"
    return f"millrace-ray-{hashlib.sha256(whose.encode()).hexdigest()[:6]}-"


def is_heads(folder: str) -> bool:
    """Whether this is the name of a head's folder. Checked because the folder that a record names is removed."""
    return Path(folder).is_absolute() and Path(folder).name.startswith("millrace-ray-")


def check_length() -> None:
    """Raise ConfigError if RAY_TMPDIR is too long for the paths of Ray's sockets."""
    most = SOCKET_BYTES - len(f"/{prefix()}0000{SOCKET}")
    length = len(os.fsencode(parent()))
    if length > most:
        raise ConfigError(
            f"has {length} bytes: a socket's path in Ray's folder there would have more than {SOCKET_BYTES}",
            where=f"RAY_TMPDIR = {parent()}",
            remedy=f"name a folder of at most {most} bytes, or unset it: Ray's folder is in /tmp then",
        )


def make() -> Path:
    """Create a folder for a head that no other user may enter. Raises the errors of `check_length`."""
    check_length()
    parent().mkdir(parents=True, exist_ok=True)
    folder = parent() / f"{prefix()}{secrets.token_hex(2)}"
    folder.mkdir(mode=PRIVATE_FOLDER)
    return folder
