"""Makes what puzzles.yaml starts from: held-out questions, and a tiny model that answers the easiest ones now and then."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym

from millrace import RunConfig
from millrace.connectors.environments.reasoning_gym import rows
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.flows.quickstart import is_warm, learn_answers, warm_config, write_rows

GENERATORS = ("chain_sum", "spell_backward")
WARM_ROWS = 2000  # of each generator, at level 0
HELD_OUT, HELD_OUT_LEVEL = 100, 1
TARGET_LOSS = 0.6  # mean of the last ten steps: much is left to learn


def prepare(config: RunConfig) -> None:
    """Write the held-out questions, and make the warmed-up model at config.model.path unless it exists."""
    if is_warm(config):
        return
    model, seed = Path(config.model.path), config.run.seed
    folder = model.parent
    folder.mkdir(parents=True, exist_ok=True)
    for name in GENERATORS:  # by another seed than those that are trained, which is 0
        held_out = rows(name, {"seed": 1}, HELD_OUT, HELD_OUT_LEVEL)
        write_rows(folder / f"{name}.jsonl", [held_out[number] for number in range(HELD_OUT)])
    warm = [row for name in GENERATORS for row in answered(name)]
    random.Random(seed).shuffle(warm)
    write_rows(folder / "train.jsonl", warm)
    build_tiny_model(folder / "model", seed=seed)
    longer = ["run.iterations=16", "rollout.prompts=2560"]
    longer += ["data.max_prompt_tokens=192", "rollout.sampling.max_new_tokens=12"]
    learn_answers(warm_config(config, folder, longer), model, TARGET_LOSS)


def answered(generator: str) -> Iterator[dict[str, str]]:
    """The easiest questions with the answers that the package knows."""
    made = rows(generator, None, WARM_ROWS, level=0)
    config = made[0]["metadata"]["config"]
    known = reasoning_gym.create_dataset(generator, seed=0, size=WARM_ROWS, **config)
    for number in range(WARM_ROWS):
        yield {"prompt": made[number]["prompt"], "label": str(known[number]["answer"])}
