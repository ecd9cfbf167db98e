"""Running millrace in processes of its own, as a user does, and reading what a run left."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

PATIENCE_S = float(os.environ.get("MILLRACE_TEST_PATIENCE_S", "240"))  # of a machine that is not busy
MALFORMED = [  # lines among the training prompts, and what is wrong with them
    ('{"prompt": "1+1=", "label"', "not JSON"),
    ('{"question": "1+1="}', "missing key"),
    ('{"prompt": ""}', "empty prompt"),
    ("", "empty line"),
    ('{"prompt": 17}', "wrong type"),
    (json.dumps({"prompt": "1" * 40, "label": "1"}), "too long"),
] * 2


def basic(login: str) -> dict[str, str]:
    """The header that brings a Prefect server what it asks for."""
    return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


class Workplace:
    """A folder with a model, data and a configuration; MILLRACE_HOME of its own. `command` starts millrace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = [sys.executable, "-m", "millrace.flows.commands"]
        self.environment = {**os.environ, "MILLRACE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING"):
            self.environment.pop(name, None)
        self._started: list[subprocess.Popen[str]] = []

    @property
    def api(self) -> str:
        """The API of the workplace's Prefect server, which runs."""
        url: str = json.loads((self.folder / "home" / "prefect-server.json").read_text())["url"]
        return url

    @property
    def login(self) -> str:
        """What the workplace's Prefect server asks for."""
        return (self.folder / "home" / "prefect-auth").read_text()

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """What the workplace's Prefect server answers."""
        headers = {"Content-Type": "application/json", **basic(self.login)}
        request = Request(f"{self.api}{path}", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a millrace command."""
        process = subprocess.Popen(
            [*self.command, *arguments],
            env={**self.environment, **environment},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started = [*(each for each in self._started if each.poll() is None), process]
        return process

    def close(self) -> None:
        """Stop the servers. Drivers that a failed test left would keep them, and are killed before."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.call("server", "stop")

    def call(self, *arguments: str, expect: int = 0, **environment: str) -> str:
        """Run a millrace command to its end and return what it printed."""
        process = self.start(*arguments, **environment)
        out = output_of(process)
        assert process.returncode == expect, f"{process.returncode}: {out}"
        return out

    def train(self, root: str | Path, *overrides: str, expect: int = 0, **environment: str) -> str:
        """Train (or go on with) the run `a` under a storage root."""
        return self.call(
            "train", "run.yaml", f"storage.root={root}", *overrides, expect=expect, **environment
        )

    def train_and_kill(self, root: str | Path, when: Callable[[], bool], *overrides: str) -> str:
        """Start the run, `kill -9` its process as soon as `when` holds, and return what it had printed."""
        process = self.start("train", "run.yaml", f"storage.root={root}", *overrides)
        wait_until(lambda: when() or process.poll() is not None)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        out = output_of(process)
        assert process.returncode == -signal.SIGKILL, f"ended before it could be killed:\n{out}"
        return out


def make_workplace(folder: Path) -> Workplace:
    """A workplace with a random model, a hundred sums, a dozen malformed rows and the configuration in run.yaml; no server runs yet."""
    from millrace.connectors.huggingface.tiny import build_tiny_model
    from millrace.connectors.huggingface.tokenizer import PromptTokenizer
    from millrace.core.config.model import Model

    place = Workplace(folder)
    build_tiny_model(folder / "model", seed=0)
    with pytest.MonkeyPatch.context() as patch:  # chosen here once, and by no driver
        patch.setenv("MILLRACE_HOME", place.environment["MILLRACE_HOME"])
        patch.chdir(folder)
        PromptTokenizer.load(Model(path=configuration()["model"]["path"]))
    rows = [{"prompt": f"{a}+{b}=", "label": str((a + b) % 10)} for a in range(10) for b in range(10)]
    lines = [json.dumps(row) for row in rows]
    for number, (bad, _) in enumerate(MALFORMED):
        lines.insert(9 * number, bad)
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
    (folder / "run.yaml").write_text(yaml.safe_dump(configuration()))
    return place


class Patience:
    """Runs out after some seconds of a machine that is not busy: where several processes wait for each core, one lasts as long as they do."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._looked = time.monotonic()

    @property
    def left(self) -> bool:
        """Whether there is some; to be asked every few seconds."""
        now = time.monotonic()
        self._left_s -= (now - self._looked) / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        self._looked = now
        return self._left_s > 0


def wait_until(holds: Callable[[], bool], patience_s: float = PATIENCE_S, *, pause_s: float = 0.002) -> None:
    """Poll until it holds; fails when patience runs out. pause_s: between two looks."""
    patience = Patience(patience_s)
    while not holds():
        assert patience.left, "waited in vain"
        time.sleep(pause_s)


def output_of(process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> str:
    """What a process printed, once it has ended. Kills it and raises TimeoutExpired when patience runs out."""
    patience = Patience(patience_s)
    while True:
        try:
            return process.communicate(timeout=1)[0] or ""
        except subprocess.TimeoutExpired:
            if not patience.left:
                process.kill()  # the next test may use the same cluster
                raise


def configuration() -> dict[str, Any]:
    """Three short iterations of two steps each, that a random model gets some reward in."""
    return {
        "run": {"name": "a", "iterations": 3},
        "model": {"path": "model"},
        "data": {"max_prompt_tokens": 32, "sources": [{"name": "sums", "path": "train.jsonl"}]},
        "rollout": {
            "prompts": 8,
            "samples_per_prompt": 4,
            "part_groups": 2,
            "sampling": {"max_new_tokens": 16},
        },
        "reward": {"function": "millrace.core.rewards.text:contains", "workers": 1},
        "algorithm": {"preset": "grpo"},
        "trainer": {"global_batch": 16, "max_pack_tokens": 512, "threads": 1, "optimizer": {"lr": 1e-3}},
        "engines": {"threads": 1},
        "checkpoint": {"every": 2},
        "evaluation": {
            "every": 2,
            "sets": [{"name": "held_out", "path": "held_out.jsonl", "sampling": {"max_new_tokens": 16}}],
        },
    }


def trained(run: Path) -> list[tuple[str, int]]:
    """What was trained, in order: (sample id, step)."""
    import pyarrow.parquet as pq

    pairs: list[tuple[str, int]] = []
    for batch in sorted((run / "iterations").glob("*/batch.parquet")):
        table = pq.read_table(batch, columns=["sample_id", "train_step"])
        pairs += zip(table["sample_id"].to_pylist(), table["train_step"].to_pylist(), strict=True)
    return pairs


def generated(run: Path) -> Counter[str]:
    """How often each sample was generated and stored, in whatever part, named by a manifest or not."""
    import pyarrow.parquet as pq

    counts: Counter[str] = Counter()
    for path in run.glob("iterations/*/rollouts/part-*.parquet"):
        counts.update(pq.read_table(path, columns=["sample_id"])["sample_id"].to_pylist())
    return counts


def failures(run: Path) -> list[str]:
    """Why samples failed to generate, a line each."""
    import pyarrow.parquet as pq

    rows = []
    for part in sorted((run / "iterations").glob("*/rollouts/part-*.parquet")):
        rows += pq.read_table(part, columns=["sample_id", "status", "reason"]).to_pylist()
    return [f"{row['sample_id']}: {row['reason']}" for row in rows if row["status"] == "failed"]


def final_weights(run: Path) -> bytes:
    """The bytes of the last Hugging Face export."""
    newest = sorted((run / "exports").iterdir())[-1]
    return (newest / "model.safetensors").read_bytes()


def exported(run: Path, iterations: int) -> bytes:
    """The bytes of the Hugging Face export after so many iterations."""
    return (run / "exports" / f"{iterations:06d}" / "model.safetensors").read_bytes()


def undisturbed(workplace: Workplace, root: Path, here: Sequence[str], model: Path, gap: float) -> str:
    """Run `a` to the end of its three iterations, whose trainer agrees with its engines within `gap` nats, and replay the last one.

    here: arguments. Returns what the replay says, which ends in equal weights.
    """
    assert "3 iterations complete, 3 of them now" in workplace.train(root, *here)
    assert len(trained(root / "a")) == 3 * 32
    for index in range(3):
        steps = json.loads((root / f"a/iterations/{index:06d}/step.json").read_text())["steps"]
        assert steps[0]["logprob_gap_mean"] < gap
    assert exported(root / "a", 3) != (model / "model.safetensors").read_bytes()
    out = workplace.call("replay", "a", "--root", str(root), "--from", "2", "--to", "3")
    assert "every weight equals the export after iteration 3, bit for bit" in out
    return out


def versions_of_samples(run: Path) -> list[list[int]]:
    """Of each generated sample the versions that made its tokens."""
    import pyarrow.parquet as pq

    columns = [
        pq.read_table(path, columns=["policy_versions"])["policy_versions"].to_pylist()
        for path in sorted(run.glob("iterations/*/rollouts/part-*.parquet"))
    ]
    return [[span["version"] for span in spans] for column in columns for spans in column if spans]


def sync_records(run: Path) -> list[dict[str, Any]]:
    """What each sync recorded, in order."""
    paths = sorted(run.glob("iterations/*/results/sync_weights.json"))
    return [json.loads(json.loads(path.read_text())["result"]) for path in paths]
