"""A site that speaks as much of Hugging Face's protocol as a download of a model needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

TOKEN = "hf_aTokenThatNobodyMaySee"


class Hub:
    """Models by name, each a list of commits with their folders, oldest first; and what was asked for."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Path]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.downloaded: list[str] = []
        self.url = ""

    def push(self, name: str, folder: Path) -> str:
        """Make a folder the newest commit of a model; returns the commit."""
        commits = self.commits.setdefault(name, {})
        commit = hashlib.sha1(f"{name}{len(commits)}".encode()).hexdigest()
        commits[commit] = folder
        return commit

    def folder(self, name: str, revision: str) -> tuple[str, Path] | None:
        """Commit and folder of a revision."""
        commits = self.commits[name]
        commit = list(commits)[-1] if revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def _answer(self, body: bool) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        name = "/".join(parts[2:4] if api else parts[:2])
        wanted = parts[4:] if api else parts[2:]
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name not in self.hub.commits or (name in self.hub.private and not allowed):
            self._refuse(401, "RepoNotFound")
            return
        if name in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return
        found = self.hub.folder(name, wanted[1] if len(wanted) > 1 else "main")
        if found is None:
            self._refuse(404, "RevisionNotFound")
            return
        commit, folder = found
        if not api:
            self._file(name, commit, folder / "/".join(wanted[2:]), body)
        elif wanted[:1] == ["tree"]:
            files = sorted(file for file in folder.iterdir() if file.is_file())
            rows = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)}
                for file in files
            ]
            self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        else:
            content = {"id": name, "modelId": name, "sha": commit, "siblings": []}
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, commit: str, file: Path, body: bool) -> None:
        if body:
            self.hub.downloaded.append(f"{name}@{commit}: {file.name}")
        headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": commit}
        self._send(200, file.read_bytes(), headers, body)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"refused: {code}"})

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(header, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(content)


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A site on loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    yield hub
    server.shutdown()
    server.server_close()


def use_in_this_process(hub: Hub, cache: Path, environment: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT and HF_HOME do for a process that starts; huggingface_hub reads them when it is imported."""
    from huggingface_hub import constants

    environment.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    environment.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    environment.setattr(constants, "HF_HUB_CACHE", str(cache))
