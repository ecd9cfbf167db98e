"""Secrets of a run's functions and servers are in nothing that the run and its servers leave or print.

That every place of a configuration that takes one is treated alike, tests/core/config/test_secrets.py says.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pyarrow.parquet as pq
import pytest
import yaml

from millrace.core.config import RunConfig
from millrace.core.config.rules.secrets import is_replaced
from millrace.core.contracts.references import references
from tests.support.engine_process import embedded_engine
from tests.support.flow_runs import Workplace, make_workplace
from tests.support.flow_runs import configuration as run_values
from tests.support.secret_places import PLACES, path

KEY, TEACHER = KEYS = (
    "engines.key",
    "algorithm.teacher_server.key",
)  # of servers; the others are of functions
FIELDS = sorted(  # those that one run without sessions can have; a set's reward lies in a list
    [
        *KEYS,
        *("run.prepare.options", "reward.options", "evaluation.sets.0.reward.options"),
        *("filter.group_filter.options", "algorithm.shaping.options"),
        *("algorithm.advantage.options", "algorithm.loss.options"),
    ]
)
ELSEWHERE = ("AWS_SECRET_ACCESS_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN")  # where libraries look for them
FUNCTIONS = """
import base64, hashlib
from pathlib import Path
from urllib.parse import quote

HERE = Path(__file__).parent

def given(place, env, block):
    seen = HERE / "seen" / f"{place}.{hashlib.sha256((env + block).encode()).hexdigest()}"
    seen.parent.mkdir(exist_ok=True)
    seen.touch()

def complaint(*secrets):
    login = [base64.b64encode(f"user:{secret}".encode()).decode() for secret in secrets]
    return f"{secrets!r} https://host/?key={quote(secrets[0], safe='')} {login} {' '.join(secrets)}"

def fails_once(place, *secrets):
    wanted = HERE / f"{place}.fails"
    if wanted.exists():
        wanted.unlink()
        try:
            raise OSError(complaint(*secrets))
        except OSError as error:
            raise RuntimeError("the service refuses" if place == "loss" else complaint(*secrets)) from error

def prepare(config, *, env, block):
    given("run.prepare.options", env, block)
    fails_once("prepare", env, block)

def reward(sample, *, env, block):
    given("reward.options", env, block)
    if sample.prompt[0] in "02468" and sample.prompt != "0+0=":  # on which the check tries it
        raise OSError(complaint(env, block))
    return len(sample.response) / 16

def group_filter(samples, *, env, block):
    given("filter.group_filter.options", env, block)

def shaping(rewards, response_lengths, truncated, *, env, block):
    given("algorithm.shaping.options", env, block)
    return rewards

def advantage(rewards, group_ids, *, env, block):
    given("algorithm.advantage.options", env, block)
    return rewards - rewards.mean()

def loss(batch, *, env, block):
    given("algorithm.loss.options", env, block)
    fails_once("loss", env, block)
    return -batch.advantages * batch.logprobs, {}
"""
SAVE = """
import json, sys
from prefect.blocks.system import Secret
for name, secret in json.load(sys.stdin).items():
    Secret(value=secret).save(name)
"""


def name_of(field: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in field)


SECRETS = (
    {  # of each field that of an environment variable and that of a block; unlike anything else, and odd letters
        (kind, field): f"pl4nted/{kind}+{name_of(field)}&K9" + ("" if field in KEYS else "'\u00e4")
        for field in FIELDS
        for kind in ("env", "block")
        if field not in KEYS or kind == "block"
    }
    | {("env", name): f"pl4nted+elsewhere/{name}" for name in ELSEWHERE}
)


def variable(field: str) -> str:
    return f"PLANTED_{name_of(field).replace('-', '_').upper()}"


def configuration(values: dict[str, object], url: str, teacher: str) -> dict[str, object]:
    """A tiny run whose fields all refer to their secrets."""
    functions = {field.removesuffix(".options") for field in FIELDS if field not in KEYS}
    for field in functions:
        *above, last = field.split(".")
        section: Any = values
        for name in above:
            section = section[int(name)] if isinstance(section, list) else section.setdefault(name, {})
        options = {
            "env": f"${{env:{variable(f'{field}.options')}}}",
            "block": f"${{prefect:{name_of(field)}-options}}",
        }
        made = {"function": f"planted:{last}", "options": options}
        if field in ("algorithm.loss", "algorithm.advantage"):
            made["kind"] = "function"
        section[last] = {**section.get(last, {}), **made}
    values["engines"] = {"kind": "external", "addresses": [url], "key": f"${{prefect:{name_of(KEY)}}}"}
    server = {"url": teacher, "key": f"${{prefect:{name_of(TEACHER)}}}"}
    values["algorithm"] |= {"distillation_coef": 0.1, "teacher_server": server}  # type: ignore[operator]
    values["run"]["iterations"] = 1  # type: ignore[index]
    values["reward"]["max_failed_share"] = 0.9  # type: ignore[index]
    values["rollout"]["prompts"] = 4  # type: ignore[index]
    values["trainer"]["global_batch"] = 16  # type: ignore[index]
    return values


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


def traces(*folders: Path, said: list[str]) -> list[str]:
    """Where one of the secrets stands: a file below the folders, or what was printed; with its field and its form."""
    files = [
        file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()
    ]
    texts = {str(file): content(file) for file in files} | {"printed": "\n".join(said).encode()}
    return [
        f"{where}: that of {field} ({kind}) as {form!r}"
        for where, text in texts.items()
        for (kind, field), secret in SECRETS.items()
        for form in forms(secret)
        if form in text
    ]


def holds(folder: Path, reference: str) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file() and reference.encode() in content(file)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    made = make_workplace(tmp_path)
    (tmp_path / "planted.py").write_text(FUNCTIONS)
    (tmp_path / "tmp").mkdir()
    made.environment |= {"TMPDIR": str(tmp_path / "tmp")}
    made.environment |= {
        variable(field) if kind == "env" and field in FIELDS else field: secret
        for (kind, field), secret in SECRETS.items()
        if kind == "env"
    }
    with tempfile.TemporaryDirectory(prefix="r") as ray:  # short: sockets lie in it
        made.environment["RAY_TMPDIR"] = ray
        try:
            yield made
        finally:
            made.call("server", "stop")


def save_blocks(place: Workplace) -> str:
    saved = {name_of(field): secret for (kind, field), secret in SECRETS.items() if kind == "block"}
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


def test_the_run_is_one_and_its_fields_take_references() -> None:
    """No run could be made of the fields once some of them lay in lists."""
    values = configuration(run_values(), "http://127.0.0.1:1", "http://127.0.0.1:2")
    stored = RunConfig.model_validate(values).model_dump()
    assert set(FIELDS) <= {path(place) for place, _ in PLACES if is_replaced(path(place))}
    for field in FIELDS:
        found: Any = stored
        for name in field.split("."):
            found = found[int(name)] if isinstance(found, list) else found[name]
        assert list(references(found)), field


@pytest.mark.slow
def test_no_secret_of_a_run_stays_anywhere_or_is_said(place: Workplace) -> None:
    home, runs, ray = place.folder / "home", place.folder / "runs", Path(place.environment["RAY_TMPDIR"])
    key, log = SECRETS["block", KEY], place.folder / "engine.log"
    model, teachers = place.folder / "model", SECRETS["block", TEACHER]
    with (
        embedded_engine(model, log=log, key=key) as (url, _),
        embedded_engine(model, log=place.folder / "teacher.log", key=teachers) as (teacher, _),
    ):
        values = configuration(yaml.safe_load((place.folder / "run.yaml").read_text()), url, teacher)
        (place.folder / "run.yaml").write_text(yaml.safe_dump(values))
        said = [place.call("check", "run.yaml", expect=2)]
        block = name_of("reward.options")
        assert f"has no Secret block {block}" in " ".join(said[0].split())
        assert f"save a Secret block with the name {block} on the Prefect server" in " ".join(said[0].split())
        said.append(save_blocks(place))
        for which in ("prepare", "loss"):
            (place.folder / f"{which}.fails").touch()
            said.append(place.train(runs, expect=2))
            assert not (place.folder / f"{which}.fails").exists(), said[-1]
            assert f"{which}.function = planted:{which}" in " ".join(said[-1].split())
        said.append(place.train(runs))
    assert not traces(place.folder, ray, said=said)
    for field in set(FIELDS) - set(KEYS):  # and each function had its own
        both = (SECRETS["env", field] + SECRETS["block", field]).encode()
        assert list((place.folder / "seen").glob(f"*.{hashlib.sha256(both).hexdigest()}")), field
    for place_of_it in (home / "prefect", home, runs):
        assert holds(place_of_it, "${env:PLANTED_REWARD_OPTIONS}"), place_of_it
    assert holds(home, "${prefect:reward-options}")
    reasons = [
        file for file in holds(runs, "https://host/?key=${env:PLANTED_REWARD_OPTIONS}") if "part" in file
    ]
    assert reasons  # of what the reward raised
    said.append(place.call("server", "stop"))
    assert not traces(place.folder, ray, said=said)
