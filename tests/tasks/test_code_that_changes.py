"""The code of a user's functions is that of the run's start: a process that begins later refuses another, and a living one is not kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.connectors.ray.actors import digest
from millrace.connectors.user_code.pool import WorkerPool
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import EXPECTED, expect, load
from millrace.core.rewards.scoring import score_sample
from millrace.flows.driver.fingerprints import own_modules

FIRST = "def score(sample):\n    return 1.0\n\ndef loss(batch):\n    return 0\n"
# Another length too: Python takes compiled code for that of a file of the same second and size.
SECOND = FIRST.replace("1.0", "0.0") + "\n# another reward\n"
ROW = {
    "prompt": '"a"',
    "response": "b",
    "label": None,
    "metadata": None,
    "response_length": 1,
    "status": "completed",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(EXPECTED, "{}")  # and put back at the end
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "code_of_mine.py"
    file.write_text(FIRST)
    yield file
    sys.modules.pop("code_of_mine", None)


def config(make_config: Callable[..., RunConfig]) -> RunConfig:
    return make_config(
        reward={"function": "code_of_mine:score"},
        algorithm={"loss": {"kind": "function", "function": "code_of_mine:loss"}},
    )


async def test_a_worker_that_begins_after_a_reward_was_replaced_refuses_it(
    module: Path, make_config: Callable[..., RunConfig]
) -> None:
    """A worker was replaced after it died, and scored the rest of the run by other code in silence."""
    expect(own_modules(config(make_config)))
    pool = WorkerPool(1)

    async def scored() -> object:
        outcome = await pool.call(score_sample, "code_of_mine:score", {}, ROW, timeout_s=60)
        return outcome.value["reward"] if outcome.kind == "done" else outcome.reason

    try:
        assert await scored() == 1.0
        module.write_text(SECOND)
        assert await scored() == 1.0  # the process that lives has the code that it began with
        for worker in list(pool._all):
            worker.kill()
        for _ in range(2):
            said = str(await scored())
            assert f"{module} changed after the run was started" in said
            assert "start the same command again" in said
        module.write_text(FIRST)
        assert await scored() == 1.0
    finally:
        pool.close()


def test_what_a_message_advises_helps(module: Path, make_config: Callable[..., RunConfig]) -> None:
    expect(own_modules(config(make_config)))
    module.write_text(SECOND)
    sys.modules.pop("code_of_mine")
    with pytest.raises(ConfigError, match="changed after the run was started"):
        load("code_of_mine:score")
    expect({})  # as the next start does
    assert load("code_of_mine:score")(None) == 0.0
    expect(own_modules(config(make_config)))
    sys.modules.pop("code_of_mine")
    assert load("code_of_mine:score")(None) == 0.0


def test_actors_that_loaded_other_code_or_other_secrets_are_not_kept(
    module: Path, make_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lived on with the loss that they had imported, while run.json said that another one held."""
    settings = config(make_config).for_actors()
    settings["engines"] = {"key": "${env:KEY_OF_MINE}"}
    settings["reward"]["options"] = {"key": "${env:OF_A_REWARD}"}  # which no actor calls
    found = []
    for code, secret in ((FIRST, "a"), (SECOND, "a"), (SECOND, "b"), (FIRST, "a")):
        module.write_text(code)
        monkeypatch.setenv("KEY_OF_MINE", secret)
        monkeypatch.setenv("OF_A_REWARD", f"another {len(found)}")
        expect(own_modules(config(make_config)))
        found.append(digest(settings))
    assert len(set(found)) == 3
    assert found[0] == found[3]
    assert digest({"start": 10}) == digest({"start": 10}) != digest({"start": 11})
