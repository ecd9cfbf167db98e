"""Storage roots of every kind: a folder, memory, and a bucket of a real S3 API server on loopback."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest


@pytest.fixture(params=["path", "file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh storage root."""
    if request.param == "path":
        return str(tmp_path)
    if request.param == "file":
        return f"file://{tmp_path}"
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}"
