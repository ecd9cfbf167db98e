"""Environments of verifiers: the package runs the episode and scores it, and asks the rollout's session for each turn.

A row's metadata holds the `index` of its task; `write_prompts` writes such rows. `run` is a rollout function, since verifiers
owns the loop. After a restart it runs again, and recorded turns are not generated again.
"""

import json
import sys
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from millrace.connectors.environments.extras import number, package
from millrace.core.errors import ConfigError
from millrace.core.hooks.protocols import RewardResult
from millrace.core.plain_text import json_text
from millrace.core.sessions.interface import Session, SessionError

FIELD = "rollout.session.function.options"
EXTRA = "verifiers"
NO_KEY = "MILLRACE_NO_KEY"  # a variable that is never set


async def run(session: Session, *, taskset: str, config: Mapping[str, Any] | None = None) -> RewardResult:
    """Run one episode of a taskset, named by its id, and return verifiers' reward.

    config: the environment's, in the form of verifiers' `env`. A seat without a harness gets a plain dialogue, and without a
    runtime it runs in this process. Exactly one seat must lack a client: the policy plays it.
    """
    vf = package("verifiers.v1", EXTRA)
    environment = _environment(taskset, config or {})
    index = number(session.task, "index")
    tasks = _tasks(taskset, _key(config))
    if "index" not in session.task.metadata:
        index %= len(tasks)
    if index >= len(tasks):
        raise ConfigError(
            f"there are {len(tasks)} tasks",
            where=f"index = {index} in a row's metadata",
            remedy="write the rows again with write_prompts",
        )
    # verifiers reads its key only from the environment, which rollouts share, so this rollout's key goes into the URL
    url = session.base_url.replace("://", f"://policy:{session.api_key}@", 1)
    client = vf.EvalClientConfig(base_url=url, api_key_var=NO_KEY)
    async with environment.serving():
        episode = await environment.run_episode(tasks[index], vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(
            "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode did not end"
        )
    if not session.turns:
        raise SessionError(
            "the environment begins with other messages than the row's prompt: write the rows with write_prompts"
        )
    (trace,) = (
        trace for trace in episode.traces if trace.agent.name in ("", None, *_policies(environment.config))
    )
    scored = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    measured = {name: value for name, value in trace.metrics.items() if value is not None}
    return RewardResult(float(trace.reward), {**measured, **scored})


def write_prompts(
    path: str | Path, taskset: str, count: int | None = None, config: Mapping[str, Any] | None = None
) -> None:
    """Write the first `count` tasks of a taskset as prompts; None writes all."""
    chat = _chat()
    harness = chat.MillraceChat(chat.MillraceChatConfig())
    with Path(path).open("w", encoding="utf-8") as file:
        for index, task in enumerate(_tasks(taskset, _key(config))[:count]):
            row = {"prompt": chat.opening(harness, task.data), "metadata": {"index": index}}
            file.write(json_text(row) + "\n")


def _chat() -> Any:
    """The harness's module, registered at the top level: verifiers finds modules only there."""
    chat = package("millrace.connectors.environments.verifiers_chat", EXTRA)
    sys.modules.setdefault(chat.NAME, chat)
    return chat


def _environment(taskset: str, config: Mapping[str, Any]) -> Any:
    loaders = package("verifiers.v1.utils.loaders", EXTRA)
    configs = package("verifiers.v1.configs.agent", EXTRA)
    given = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
    try:
        kind = loaders.env_config_type(taskset, str(config.get("id", "")))
        for seat, declared in configs.agent_config_fields(kind(taskset=given["taskset"])).items():
            plain = {"runtime": {"type": "subprocess"}, "network_notice": False}
            if declared.harness is None:
                plain["harness"] = {"id": _chat().NAME}
            given[seat] = {**plain, **config.get(seat, {})}
        environment = loaders.load_environment(loaders.resolve_env_config(given))
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"verifiers cannot load it: {error}",
            where=f"{FIELD}.taskset = {taskset}",
            remedy="install the taskset's package, and correct config",
        ) from error
    policies = _policies(environment.config)
    if len(policies) != 1:
        raise ConfigError(
            f"the seats {', '.join(policies) or '(none)'} have no client; exactly one must have none, for the policy",
            where=f"{FIELD}.config",
            remedy="give every other seat a client",
        )
    return environment


def _policies(config: Any) -> list[str]:
    """The seats without a client, which the policy would play."""
    seats = package("verifiers.v1.configs.agent", EXTRA).agent_config_fields(config)
    return [name for name, seat in seats.items() if seat.client is None]


def _key(config: Mapping[str, Any] | None) -> str:
    return json.dumps(config or {}, sort_keys=True)


@lru_cache(maxsize=8)
def _tasks(taskset: str, config: str, most: int = 1_000_000) -> list[Any]:
    """All tasks of a taskset; the first 10,000 if it has no end."""
    found = _environment(taskset, json.loads(config)).taskset
    return list(islice(found, most if found.bounded else 10_000))


def main() -> None:
    """Write a file of prompts."""
    if len(sys.argv) != 4 or not sys.argv[2].isdigit():
        sys.exit("usage: python -m millrace.connectors.environments.verifiers TASKSET COUNT FILE.jsonl")
    write_prompts(sys.argv[3], sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
