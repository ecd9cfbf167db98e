"""Uses an installed millrace as its user does, from an empty folder: checks, trains, resumes from a checkpoint, looks.

Under root the user is another one, who may read everything and write nothing but what is that user's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import yaml

from tests.installed.environment import Environment

READS_ALL = [
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]  # the interpreter may lie in root's home
SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # where everybody may write
MODEL = "from pathlib import Path; from millrace.connectors.huggingface.tiny import build_tiny_model as b; b(Path('model'), seed=0)"
RUN = {
    "run": {"name": "a", "iterations": 2},
    "model": {"path": "model"},
    "data": {"max_prompt_tokens": 16, "sources": [{"name": "sums", "path": "train.jsonl"}]},
    "rollout": {"prompts": 4, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 4}},
    "reward": {"function": "rewards:score"},
    "checkpoint": {"every": 1},
}
REWARD = "def score(sample, label=None, **_):\n    return float(str(label) in sample.response)\n"


class User:
    """Somebody with a home, a folder to work in and one for temporary files; nothing else is theirs."""

    def __init__(self, folder: Path) -> None:
        self.uid = os.getuid() or 20_000 + os.getpid() % 10_000
        self.folder, self.work = folder, folder / "work"
        compiled = folder.parent / "compiled"
        for place in (folder, self.work, folder / "home", folder / "tmp", compiled):
            place.mkdir(exist_ok=True)
            os.chown(place, self.uid, -1)
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "USER": "somebody",
            "OMP_NUM_THREADS": "1",
            "PYTHONPYCACHEPREFIX": str(compiled),  # else each process compiles torch again
        }
        another = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", *READS_ALL]
        self.prefix = another if os.getuid() == 0 else []

    def run(self, *command: str | Path, expect: int = 0) -> str:
        """What a command of the user prints."""
        done = subprocess.run(
            [*self.prefix, *command], cwd=self.work, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == expect, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def left_outside(self) -> list[Path]:
        """The user's files outside the user's folders, and in the home but for ~/.millrace."""
        if not self.prefix:
            return []
        return [
            *(path for place in SHARED for path in _owned(Path(place), self.uid, self.folder)),
            *(path for path in (self.folder / "home").iterdir() if path.name != ".millrace"),
        ]


def _owned(place: Path, uid: int, but: Path) -> Iterator[Path]:
    for entry in os.scandir(place):
        try:
            if Path(entry.path) not in but.parents and entry.stat(follow_symlinks=False).st_uid == uid:
                yield Path(entry.path)
        except FileNotFoundError:
            continue


def use(environment: Environment, folder: Path) -> None:
    """Two iterations, then a third from the second's checkpoint. Raises AssertionError with what a command printed."""
    user = User(folder)
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(10) for b in range(10)]
    (user.work / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (user.work / "rewards.py").write_text(REWARD)
    (user.work / "run.yaml").write_text(yaml.safe_dump(RUN))
    millrace = environment.millrace
    user.run(environment.python, "-c", MODEL)
    plan = user.run(millrace, "check", "run.yaml")
    print(next(line for line in plan.splitlines() if line.startswith("versions")), flush=True)
    try:
        assert "2 iterations complete, 2 of them now" in user.run(millrace, "train", "run.yaml")
        out = user.run(millrace, "train", "run.yaml", "run.iterations=3")
        assert "3 iterations complete, 1 of them now" in out
        assert (user.work / "runs/a/checkpoints/000003/complete.json").exists()
        print(user.run(millrace, "show", "a"), flush=True)
        page = json.loads((user.folder / "home/.millrace/prefect-server.json").read_text())["url"]
        with urlopen(page.removesuffix("/api"), timeout=60) as answer:
            assert b"<html" in answer.read()
    finally:
        user.run(millrace, "server", "stop")
    left = user.left_outside()
    assert not left, f"the run wrote outside its folders: {left}"
    shutil.rmtree(folder)
