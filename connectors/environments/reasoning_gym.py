"""Questions of Reasoning Gym: every generator by its name, scored by the package.

A row's metadata holds the `index` of its question, and may name `generator` and `config`. `rows` makes rows for a data source,
at any level of difficulty. `write_prompts` writes a file of rows, as does
`python -m millrace.connectors.environments.reasoning_gym leg_counting 1000 prompts.jsonl`. `score` is their reward.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from millrace.connectors.environments.extras import last_message, number, package
from millrace.core.errors import ConfigError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.plain_text import json_text
from millrace.core.sessions.interface import Done, Observation, Task, Turn

FIELD = "rollout.session.environment.options"
COMPOSITE = "composite"  # the package's generator that draws from several others
HOW = "Give the final answer between <answer> and </answer>."


class ReasoningGym:
    """One question and its answer."""

    recovery: Literal["stateless"] = "stateless"

    def __init__(
        self, generator: str = "", config: Mapping[str, Any] | None = None, size: int = 10_000
    ) -> None:
        """generator, config: for rows that do not name them. size: questions per generator; a larger index wraps around."""
        self._generator, self._config, self._size = generator, dict(config or {}), size

    async def reset(self, task: Task) -> Observation | None:
        """Show the question, unless the prompt ends with it."""
        generator = str(task.metadata.get("generator", self._generator))
        config = task.metadata.get("config", self._config)
        self._questions = _questions(generator, json.dumps(config, sort_keys=True), self._size)
        self._entry = self._questions[number(task, "index") % self._size]
        question = self._entry["question"]
        return None if question in last_message(task) else Observation(f"{question}\n\n{HOW}")

    async def step(self, turn: Turn) -> Done:
        """Score the text of the last <answer>, otherwise the whole turn."""
        return Done(*_scored(turn.content, self._questions, self._entry))

    async def close(self) -> None:
        """Nothing to close."""


class GeneratedRows:
    """A generator's questions as rows of a source, each made on demand."""

    def __init__(self, generator: str, config: Mapping[str, Any], size: int) -> None:
        self._generator, self._config, self._size = generator, dict(config), size
        self._questions = _questions(generator, json.dumps(self._config, sort_keys=True), size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        made = {"generator": self._generator, "config": self._config, "index": index, "size": self._size}
        return {"prompt": f"{self._questions[index]['question']}\n\n{HOW}", "metadata": made}


def rows(
    generator: str, config: Mapping[str, Any] | None = None, size: int = 10_000, level: int | None = None
) -> GeneratedRows:
    """Rows of a data source (millrace.DataSource): `size` questions of a generator.

    level: sets every attribute of the generator's curriculum, each at most to its highest level; `config` has precedence.
    Errors: ConfigError if the generator is unknown, has no curriculum, or does not accept the config.
    """
    given = dict(config or {})
    return GeneratedRows(
        generator, given if level is None else {**_of_level(generator, level), **given}, size
    )


def score(sample: RewardInput) -> RewardResult:
    """The package's score of the last <answer>, otherwise of the whole response (millrace.Reward)."""
    made = sample.metadata
    questions = _questions(
        str(made["generator"]), json.dumps(made["config"], sort_keys=True), int(made.get("size", 10_000))
    )
    return RewardResult(*_scored(sample.response, questions, questions[int(made["index"])]))


def _scored(text: str, questions: Any, entry: Any) -> tuple[float, dict[str, float]]:
    extract = package("reasoning_gym.utils", "reasoning-gym").extract_answer
    answer = extract(text)
    found = text.strip() if answer is None else answer
    return float(questions.score_answer(found, entry)), {"tagged": float(answer is not None)}


def _of_level(generator: str, level: int) -> dict[str, Any]:
    """A generator's config at a level of its curriculum."""
    factory = package("reasoning_gym.factory", "reasoning-gym")
    package("reasoning_gym", "reasoning-gym")
    if not factory.has_curriculum(generator):
        raise ConfigError(
            f"the generator {generator} has no curriculum",
            where="data.sources[].levels",
            remedy="set them to null, or choose another generator",
        )
    curriculum = factory.create_curriculum(generator)
    curriculum.set_global_level(level)
    made = asdict(curriculum.generate_configuration())
    return {name: value for name, value in made.items() if name not in ("seed", "size")}


@lru_cache(maxsize=64)
def _questions(generator: str, config: str, size: int) -> Any:
    """A generator's questions, with the seed in its config or 0."""
    package("reasoning_gym", "reasoning-gym")
    factory = package("reasoning_gym.factory", "reasoning-gym")
    if generator not in factory.DATASETS:
        raise ConfigError(
            f"Reasoning Gym has no generator of this name; it has {', '.join(sorted(factory.DATASETS))}",
            where=f"{FIELD}.generator = {generator}",
            remedy="choose one of these, here or in a row's metadata",
        )
    given = json.loads(config)
    try:
        if generator == COMPOSITE:
            part = package("reasoning_gym.composite", "reasoning-gym").DatasetSpec
            given["datasets"] = [part(**{"weight": 1.0, "config": {}, **each}) for each in given["datasets"]]
        return factory.create_dataset(generator, **{"seed": 0, **given, "size": size})
    except KeyError as error:
        raise ConfigError(
            f"{COMPOSITE} has no {error}",
            where=f"{FIELD}.config",
            remedy="list the generators that it draws from: {datasets: [{name: chain_sum, weight: 2}, {name: gcd}]}",
        ) from error
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"the generator {generator} does not take it: {error}",
            where=f"{FIELD}.config",
            remedy="give it the fields of the generator's own config",
        ) from error


def write_prompts(
    path: str | Path,
    generator: str,
    count: int,
    config: Mapping[str, Any] | None = None,
    first: int = 0,
    size: int = 10_000,
) -> None:
    """Write `count` questions of a generator as prompts, from question `first` on. `size`: the environment's option."""
    if first + count > size:
        last = first + count - 1
        raise ValueError(f"asked for questions {first} to {last}, but size is {size}; raise size")
    config = dict(config or {})
    questions = _questions(generator, json.dumps(config, sort_keys=True), size)
    with Path(path).open("w", encoding="utf-8") as file:
        for index in range(first, first + count):
            entry = questions[index]
            row = {
                "prompt": f"{entry['question']}\n\n{HOW}",
                "metadata": {"generator": generator, "config": config, "index": index},
            }
            file.write(json_text(row) + "\n")


def main() -> None:
    """Write a file of prompts."""
    if len(sys.argv) != 4 or not sys.argv[2].isdigit():
        sys.exit("usage: python -m millrace.connectors.environments.reasoning_gym GENERATOR COUNT FILE.jsonl")
    write_prompts(sys.argv[3], sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
