"""Secrets of a run's functions and servers are in nothing that the run and its servers leave or print.

Three runs have a secret in every place of a configuration that takes one: of single answers, of sessions, and in an environment.
That every place is treated alike, tests/core/config/test_secrets.py says.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.core.config import RunConfig
from millrace.core.config.secret_rules import is_replaced
from millrace.core.contracts.references import references
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace, make_workplace
from tests.support.flow_runs import configuration as run_values
from tests.support.planted import Secrets, holds, name_of, save_blocks, traces, variable
from tests.support.planted_modules import FUNCTIONS, SERVER
from tests.support.secret_places import PLACES, path

KEY, TEACHER = KEYS = (
    "engines.key",
    "algorithm.teacher_server.key",
)  # of servers; the others are of functions
ELSEWHERE = ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN")  # where libraries look for them
OWN_NAMES = {  # of functions; others have the name of their field
    "rollout.session.function": "plays",
    "rollout.session.named.0": "other",
    "rollout.session.tools.0": "note",
    "rollout.session.environment": "Environment",
    "reward.named.0": "reward",
}


@dataclass(frozen=True)
class Planted:
    """A run: its places with secrets, the lists that they lie in, and its functions that fail once, each in a start of its own."""

    fields: tuple[str, ...]
    section: dict[str, Any]
    fail_once: tuple[str, ...]
    stored: str  # the field whose complaints are stored with samples
    iterations: int = 1


RUNS = {
    "answers": Planted(
        (
            *KEYS,
            *("run.prepare.options", "reward.options", "evaluation.sets.0.reward.options"),
            *("filter.group_filter.options", "algorithm.shaping.options"),
            *("algorithm.advantage.options", "algorithm.loss.options"),
            "algorithm.teacher_server.hint.options",
        ),
        {},
        ("prepare", "loss"),
        "reward.options",
    ),
    "sessions": Planted(
        (
            *("rollout.session.function.options", "rollout.session.named.0.options"),
            *("rollout.session.tools.0.options", "rollout.session.tools.1.mcp.env"),
            *("rollout.session.tools.2.mcp.headers", "rollout.buffer.buffer_filter.options"),
            *("reward.named.0.options", "data.sources.0.reward.options", "data.sources.1.rows.options"),
        ),
        {
            "rollout": {
                "session": {
                    "named": [{"name": "other"}],
                    "tools": [
                        {},
                        {"mcp": {"command": [sys.executable, "planted_server.py"]}},
                        {"mcp": {"url": "http://127.0.0.1:1/mcp"}},
                    ],
                    "max_tokens": 256,
                },
                "buffer": {"share": 0.25, "max_age": 4, "max_uses": 2},
            },
            "reward": {"named": [{"name": "named"}]},
            "data": {
                "sources": [
                    {"name": "sums", "path": "train.jsonl"},
                    {"name": "own", "metadata_key": "metadata"},
                ],
                "max_quarantined_share": 0.5,
            },
            "algorithm": {"correction": {"kind": "truncate"}},
        },
        ("rows", "buffer_filter"),
        "rollout.session.function.options",
        iterations=2,
    ),
    "environment": Planted(
        ("rollout.session.environment.options",),
        {"rollout": {"session": {"max_tokens": 64}}},
        (),
        "rollout.session.environment.options",
    ),
}


def secrets_of(run: str) -> Secrets:
    """Of each field that of an environment variable and that of a block: unlike anything else, and odd letters where those may be."""
    plain = (*KEYS, "rollout.session.tools.2.mcp.headers")
    return {
        (kind, field): f"pl4nted/{kind}+{name_of(field)}&K9" + ("" if field in plain else "'\u00e4")
        for field in RUNS[run].fields
        for kind in ("env", "block")
        if field not in KEYS or kind == "block"
    } | {("env", name): f"pl4nted+elsewhere/{name}" for name in ELSEWHERE}


def section_at(values: Any, field: str) -> Any:
    """The mapping at a field's path, which is made where it is none."""
    for name in field.split("."):
        if isinstance(values, list):
            values = values[int(name)]
        else:
            values[name] = values.get(name) or {}
            values = values[name]
    return values


def merged(values: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    """Values with those of a section in their place, however deep."""
    return values | {
        name: merged(values.get(name) or {}, item) if isinstance(item, dict) else item
        for name, item in section.items()
    }


def configuration(run: str, values: dict[str, Any], url: str = "", teacher: str = "") -> dict[str, Any]:
    """A tiny run whose fields all refer to their secrets. url, teacher: of servers, where it has such."""
    planted = RUNS[run]
    values = merged(values, yaml.safe_load(yaml.safe_dump(planted.section)))
    for field in set(planted.fields) - set(KEYS):
        env, block = f"${{env:{variable(field)}}}", f"${{prefect:{name_of(field)}}}"
        if field.endswith(".mcp.env"):
            section_at(values, field).update({"OF_ENV": env, "OF_BLOCK": block})
        elif field.endswith(".mcp.headers"):
            section_at(values, field).update({"X-Env": env, "X-Block": block})
        else:
            above = field.removesuffix(".options")
            name = OWN_NAMES.get(above, above.rpartition(".")[2])
            made = {"function": f"planted:{name}", "options": {"env": env, "block": block}}
            if above in ("algorithm.loss", "algorithm.advantage"):
                made["kind"] = "function"
            section_at(values, above).update(made)
    if KEY in planted.fields:
        values["engines"] = {"kind": "external", "addresses": [url], "key": f"${{prefect:{name_of(KEY)}}}"}
        server = {"url": teacher, "key": f"${{prefect:{name_of(TEACHER)}}}"}
        values["algorithm"] |= {"distillation_coef": 0.1}
        values["algorithm"]["teacher_server"] |= server
    values["run"]["iterations"] = planted.iterations
    values["reward"]["max_failed_share"] = values["rollout"]["max_failed_share"] = 0.9
    values["rollout"]["prompts"] = 8
    values["trainer"]["global_batch"] = 16
    return values


@pytest.fixture
def place(run: str, tmp_path: Path) -> Iterator[Workplace]:
    made = make_workplace(tmp_path)
    (tmp_path / "planted.py").write_text(FUNCTIONS)
    (tmp_path / "planted_server.py").write_text(SERVER)
    (tmp_path / "tmp").mkdir()
    made.environment |= {"TMPDIR": str(tmp_path / "tmp")}
    made.environment |= {
        variable(field) if field in RUNS[run].fields else field: secret
        for (kind, field), secret in secrets_of(run).items()
        if kind == "env"
    }
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as ray:  # short: sockets lie in it
        made.environment["RAY_TMPDIR"] = ray
        try:
            yield made
        finally:
            made.call("server", "stop")


@contextlib.contextmanager
def servers(run: str, place: Workplace) -> Iterator[dict[str, Any]]:
    """The run's configuration with the servers that it names, which run meanwhile."""
    values, secrets = yaml.safe_load((place.folder / "run.yaml").read_text()), secrets_of(run)
    model = place.folder / "model"
    with contextlib.ExitStack() as stack:
        if run == "answers":
            urls = []
            for field in KEYS:
                log = place.folder / f"{name_of(field)}.log"
                engine = embedded_engine(model, log=log, key=secrets["block", field])
                urls.append(stack.enter_context(engine)[0])
            yield configuration(run, values, *urls)
        elif run == "sessions":
            made = configuration(run, values)
            _, started, running = (tool.get("mcp") for tool in made["rollout"]["session"]["tools"])
            started["command"][1] = str(place.folder / "planted_server.py")
            running["url"] = stack.enter_context(served(place))
            yield made
        else:
            yield configuration(run, values)


@contextlib.contextmanager
def served(place: Workplace) -> Iterator[str]:
    """The address of an MCP server that runs by itself, and knows no secret."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "planted_server.py", str(port)],
        cwd=place.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_the_runs_have_a_secret_in_every_place_that_takes_one() -> None:
    """A new place without a run fails."""
    places = {path(place) for place, _ in PLACES if is_replaced(path(place))}
    planted = [re.sub(r"\.\d+", ".0", field) for run in RUNS.values() for field in run.fields]
    assert set(planted) == places
    assert len(planted) == len(places)


@pytest.mark.parametrize("run", RUNS)
def test_the_run_is_one_and_its_fields_take_references(run: str) -> None:
    """No run could be made of the fields once some of them lay in lists."""
    values = configuration(run, run_values(), "http://127.0.0.1:1", "http://127.0.0.1:2")
    stored = RunConfig.model_validate(values).model_dump()
    for field in RUNS[run].fields:
        found: Any = stored
        for name in field.split("."):
            found = found[int(name)] if isinstance(found, list) else found[name]
        assert list(references(found)), field


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_no_secret_of_a_run_stays_anywhere_or_is_said(run: str, place: Workplace) -> None:
    home, runs, ray = place.folder / "home", place.folder / "runs", Path(place.environment["RAY_TMPDIR"])
    planted, secrets, said = RUNS[run], secrets_of(run), []
    with servers(run, place) as values:
        (place.folder / "run.yaml").write_text(yaml.safe_dump(values))
        said.append(place.call("check", "run.yaml", expect=2))
        block = name_of(planted.stored)
        assert f"has no Secret block {block}" in " ".join(said[0].split())
        assert f"save a Secret block with the name {block} on the Prefect server" in " ".join(said[0].split())
        said.append(save_blocks(place, secrets))
        for which in planted.fail_once:
            (place.folder / f"{which}.fails").touch()
            said.append(place.train(runs, expect=2))
            assert not (place.folder / f"{which}.fails").exists(), said[-1]
            assert f"planted:{which}" in " ".join(said[-1].split())
        said.append(place.train(runs))
    assert not traces(secrets, place.folder, ray, said=said)
    for field in set(planted.fields) - set(KEYS):  # and each function had its own
        both = (secrets["env", field] + secrets["block", field]).encode()
        assert list((place.folder / "seen").glob(f"*.{hashlib.sha256(both).hexdigest()}")), field
    for place_of_it in (home / "prefect", home, runs):
        assert holds(place_of_it, f"${{env:{variable(planted.stored)}}}"), place_of_it
    assert holds(home, f"${{prefect:{block}}}")
    complaints = holds(runs, f"https://host/?key=${{env:{variable(planted.stored)}}}")
    assert [file for file in complaints if "part" in file]
    said.append(place.call("server", "stop"))
    assert not traces(secrets, place.folder, ray, said=said)
