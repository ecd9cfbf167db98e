"""A tiny model that calls tools now and then: made, and warmed up on dialogues, so that RL finds something to reward.

Owns how a dialogue becomes rows of supervised training. The training itself is the quickstart's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

from millrace.connectors.huggingface.template import ChatTemplate
from millrace.connectors.huggingface.tiny import TOOL_TEMPLATE
from millrace.connectors.user_code.mcp_tools import tool_schemas
from millrace.core.config import RunConfig
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.errors import ConfigError
from millrace.core.hooks.loading import load_function
from millrace.flows.quickstart import (
    GPU_SHAPE,
    GPU_WARM_UP,
    HELD_OUT,
    is_warm,
    learn_answers,
    warm_config,
    write_rows,
)

TRIES = 20  # attempts to find each problem with a new prompt


class Problem(TypedDict):
    """A row of the run, and a dialogue that answers it, rightly or wrongly."""

    prompt: str
    label: str
    dialogue: Sequence[str]  # after the prompt: a turn, a tool's answer, a turn, and so on to the last turn


class MakeProblem(Protocol):
    """Makes a problem that depends only on the random numbers."""

    def __call__(self, rng: random.Random) -> Problem: ...


def prepare(config: RunConfig, *, problem: str, count: int = 5000, iterations: int = 7) -> None:
    """Write prompts of `count` different problems, and make a warmed-up model at config.model.path unless it exists.

    problem: import path of a MakeProblem. iterations: of the warm-up. For SGLang the model has a shape that its kernels accept.
    """
    if is_warm(config):
        return
    from millrace.connectors.huggingface.tiny import build_tiny_model

    make: MakeProblem = load_function(UserFunction(function=problem), "run.prepare.options.problem")
    problems = different(make, config.run.seed, count)
    folder = Path(config.model.path).parent
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": each["prompt"], "label": each["label"]} for each in problems]
    write_rows(folder / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(folder / "train.jsonl", rows[HELD_OUT:])
    tools = tool_schemas(config.rollout.session.tools if config.rollout.session else ())
    turns = [turn for each in problems[HELD_OUT:] for turn in turns_of(each, tools)]
    write_rows(folder / "turns.jsonl", turns)
    for_gpu = config.engines.kind == "sglang"
    build_tiny_model(folder / "model", seed=config.run.seed, tools=True, **(GPU_SHAPE if for_gpu else {}))
    overrides = [
        f"run.iterations={iterations}",
        f"data.sources.0.path={folder / 'turns.jsonl'}",
        "data.sources.0.chat=false",  # they are rendered already
        f"data.max_prompt_tokens={max(len(turn['prompt']) for turn in turns)}",
        *(GPU_WARM_UP if for_gpu else ()),
    ]
    learn_answers(warm_config(config, folder, overrides), Path(config.model.path))


def turns_of(problem: Problem, tools: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """A row for each turn of the dialogue: the whole text before it as the prompt, and its text as the answer."""
    template = ChatTemplate(TOOL_TEMPLATE, {})
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem["prompt"]}]
    for position, text in enumerate(problem["dialogue"]):
        if position % 2 == 0:
            yield {"prompt": template.render(messages, tools=tools), "label": text}
        messages.append({"role": "tool" if position % 2 else "assistant", "content": text})


def different(make: MakeProblem, seed: int, count: int) -> list[Problem]:
    """Problems whose prompts differ."""
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    for _ in range(TRIES * count):
        problem = make(rng)
        found.setdefault(problem["prompt"], problem)
        if len(found) == count:
            return list(found.values())
    raise ConfigError(
        f"only {len(found)} of the problems that it made have different prompts",
        where=f"run.prepare.options.count = {count}",
        remedy="lower it, or let the function make more problems",
    )
