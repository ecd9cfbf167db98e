"""The forms of a reward: function or class, sync or async, of one sample or of a group, or with slime's signature.

Owns how each is loaded and called; knows nothing of rows, processes, or the meaning of an answer. A class is instantiated once
in a process for each set of its options, and the instance is called for every sample.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from millrace.core.contracts.references import resolved
from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import load, written_for_slime
from millrace.core.hooks.slime.reward import SlimeReward

_made: dict[tuple[str, str], Callable[..., Any]] = {}  # instances of classes


def reward_of(path: str, options: Mapping[str, Any], field: str = "reward") -> Callable[[Any], Any]:
    """The function to call with a sample, or a group's samples, with its options bound and references to secrets resolved.

    Errors: ConfigError for an option whose reference is not set; errors of `bound`.
    """
    return bound(path, resolved(options, f"{field}.options"), field)


def bound(path: str, given: Mapping[str, Any], field: str) -> Callable[[Any], Any]:
    """The function to call, with its options bound unchanged.

    Errors: ConfigError when it cannot be loaded, or its objects cannot be called; for a class, what its constructor raises.
    """
    function = load(path, f"{field}.function")
    slime = written_for_slime(path)
    if not inspect.isclass(function):
        if slime:
            return SlimeReward(function, given)
        return partial(function, **given) if given else function
    key = (path, json.dumps(given, sort_keys=True, default=repr))
    if key not in _made:
        made = SlimeReward(function, given) if slime else function(**given)
        if not callable(made):
            raise ConfigError(
                f"objects of the class {function.__name__} cannot be called",
                where=f"{field}.function = {path}",
                remedy="give it a method __call__(self, sample); name one with compute_reward(prompts, responses) as "
                f"slime:{path.replace(':', '.')}",
            )
        _made[key] = made
    return _made[key]


def answer_of(function: Callable[[Any], Any], samples: Any) -> Any:
    """A reward's answer for a sample or a group; an async reward gets a new event loop."""
    answer = function(samples)
    return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer


async def awaited_answer_of(function: Callable[[Any], Any], samples: Any) -> Any:
    """A reward's answer for a sample or a group, in the running event loop."""
    answer = function(samples)
    return await answer if inspect.isawaitable(answer) else answer


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
