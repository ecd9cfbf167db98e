"""Uses an installed millrace as its user does, from an empty folder: new, check, train, resume from a checkpoint, show.

Under root the user is another one, who may read everything and write nothing but what is that user's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from urllib.request import urlopen

from millrace.flows.preflight.check_versions import other_patches, untested
from tests.installed.environment import Environment

READS_ALL = [
    "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search",
]  # the interpreter may lie in root's home
SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # where everybody may write
RUN = "start"  # the folder that `millrace new` makes, and so the run's name
MODEL = f"from millrace.connectors.huggingface.tiny import build_tiny_model as b; b('{RUN}/models/warm-model', seed=0)"
REWARD = """

def digits(sample: RewardInput) -> float:
    return sum(character.isdigit() for character in sample.response) / 6
"""
QUERY = (
    "SELECT iteration, count(DISTINCT prompt) AS prompts FROM samples WHERE label <> '' GROUP BY iteration"
)
TINY = (  # the rest of run.yaml is as it was written; a model of random weights knows no sum, but writes digits
    "reward.function=rewards:digits",
    "rollout.prompts=4",
    "rollout.samples_per_prompt=4",
    "rollout.part_groups=4",
    "trainer.global_batch=8",
    "checkpoint.every=1",
)


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

    def run(self, *command: str | Path) -> str:
        """What a command of the user prints. It must end well; how long it took is printed."""
        started = time.monotonic()
        done = subprocess.run(
            [*self.prefix, *command], cwd=self.work, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        shown = " ".join([Path(command[0]).name, *map(str, command[1:])])
        assert done.returncode == 0, f"{shown}: {done.returncode}\n{done.stdout}"
        print(f"{time.monotonic() - started:6.1f} s  {shown}", flush=True)
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


def use(environment: Environment, folder: Path, *, whole: bool) -> None:
    """Two iterations of what `millrace new` writes, then a third from the second's checkpoint.

    whole: at its own size, with the model that its first start makes; else a tiny one lies there already.
    Raises AssertionError with what a command printed.
    """
    user, millrace = User(folder), environment.millrace
    user.run(millrace, "new", RUN)
    if not whole:
        user.run(environment.python, "-c", MODEL)
        with (user.work / RUN / "rewards.py").open("a") as rewards:
            rewards.write(REWARD)
    user.work /= RUN
    sizes = ["checkpoint.every=1"] if whole else TINY
    plan = user.run(millrace, "check", "run.yaml", *sizes)
    print("\n".join(told := _versions(plan)), flush=True)
    found = environment.versions()
    named = untested(found) | other_patches(found)
    assert all(f"{name} {version} (tested: " in plan for name, version in named.items()), (named, told)
    assert named or told[0].endswith(": tested"), told
    try:
        out = user.run(millrace, "train", "run.yaml", "run.iterations=2", *sizes)
        assert "2 iterations complete, 2 of them now" in out, out
        out = user.run(millrace, "train", "run.yaml", "run.iterations=3", *sizes)
        assert "3 iterations complete, 1 of them now" in out, out
        assert (user.work / f"runs/{RUN}/checkpoints/000003/complete.json").exists()
        print(user.run(millrace, "show", RUN), flush=True)
        shown = json.loads(user.run(millrace, "show", RUN, "--json"))
        assert shown["state"] == "complete; 3 of 3 iterations", shown
        assert "None" not in shown.values(), shown
        before, *iterations = shown["rows"]
        assert [before["iteration"], *(row["iteration"] for row in iterations)] == [0, 1, 2, 3], shown
        assert all(row["grad_norm"] > 0 for row in iterations), shown
        asked = json.loads(user.run(millrace, "sql", RUN, QUERY, "--json"))
        assert sorted(row["iteration"] for row in asked) == [1, 2, 3], asked
        assert all(row["prompts"] > 1 for row in asked), asked
        page = json.loads((user.folder / "home/.millrace/prefect-server.json").read_text())["url"]
        with urlopen(page.removesuffix("/api"), timeout=60) as answer:
            assert b"<html" in answer.read()
    finally:
        user.run(millrace, "server", "stop")
    left = user.left_outside()
    assert not left, f"the run wrote outside its folders: {left}"
    shutil.rmtree(folder)


def _versions(plan: str) -> list[str]:
    """The plan's lines on versions: the first, and those indented under it."""
    lines = plan.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("versions "))
    return [lines[start], *takewhile(lambda line: line.startswith(" "), lines[start + 1 :])]
