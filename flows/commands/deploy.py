"""`millrace deploy`: Prefect deployments of millrace, one for each given file and each recipe, to run from a user's folder.

Owns how a recipe becomes a deployment. deployments/ holds the rest: prefect.yaml the deployments for any run, pools/ the job
variables of each kind of work pool, automations.yaml the server's automations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from millrace.connectors.prefect.server import ensure_server, export_line
from millrace.core.config import RunConfig
from millrace.core.config.reading.files import read_files
from millrace.core.config.reading.load import load_config
from millrace.core.errors import ConfigError
from millrace.core.tracker import run_tags
from millrace.flows.commands.terminal import guarded, print_lines

if TYPE_CHECKING:
    from prefect import Flow

    from millrace.connectors.prefect.deployments import Described, Pool


# added to every description
BUTTONS = (
    "Name the run in `run.name`: the form's Run Name is not used. "
    "Pause ends the processes within seconds and keeps what finished. Nothing resumes by itself, in spite of the page's words: press Resume "
    "within the pause's time, and Retry after it."
)
TAG = "millrace"  # tag of all deployments, by which automations find their runs
FILES = Path(str(resources.files("millrace.deployments")))


def deploy(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="YAML files of runs that get a deployment each."),
    ] = None,
    recipes: Annotated[bool, typer.Option("--recipes", help="Deploy millrace's recipes too.")] = False,
    pool: Annotated[
        str, typer.Option(help="Work pool of the deployments; created unless it exists.")
    ] = "local",
    kind: Annotated[
        str, typer.Option("--type", help="How the pool runs a flow run: process, docker or kubernetes.")
    ] = "process",
    image: Annotated[
        str | None, typer.Option(help="Image that has millrace, for docker and kubernetes.")
    ] = None,
) -> None:
    """Create Prefect deployments of the files, and of the flows for any run; a worker runs them from this folder."""
    print_lines(
        guarded(
            lambda: deploy_all(Path.cwd(), files or (), recipes=recipes, pool=pool, kind=kind, image=image)
        )
    )


def deploy_all(
    folder: Path,
    files: Sequence[Path] = (),
    *,
    recipes: bool = False,
    pool: str = "local",
    kind: str = "process",
    image: str | None = None,
) -> list[str]:
    """Create the work pool, unless it exists, the deployments and the automations; returns the lines that start a worker.

    Flow runs import from `folder` and resolve relative paths against it. files: YAML files of runs. recipes: whether millrace's
    recipes get deployments too. image: for containers.
    """
    where = pool_of(pool, kind, str(folder), image)
    described = all_deployments(files, recipes)
    api = ensure_server()
    asyncio.run(_create(described, where, str(folder)))
    return [
        f"Deployments: {', '.join(map(shown_name, described))}",
        f"train/train and sft/sft are forms, train/file takes a YAML file. They run from {folder} once a worker runs:",
        export_line(api),
        f"prefect worker start --pool {pool}",
    ]


async def _create(described: Sequence[Described], pool: Pool, folder: str) -> None:
    from millrace.connectors.prefect.deployments import create_deployments, keep_automations
    from millrace.flows.convert import convert
    from millrace.flows.from_file import train_file, train_recipe
    from millrace.flows.sft import sft
    from millrace.flows.train import train

    all_flows: tuple[Flow[..., Any], ...] = (train, sft, train_file, train_recipe, convert)
    flows = {f"{flow.fn.__module__}.{flow.fn.__name__}": flow for flow in all_flows}
    await create_deployments(described, flows, pool, folder)
    await keep_automations(FILES / "automations.yaml")


def pool_of(name: str, kind: str, folder: str, image: str | None) -> Pool:
    """The work pool of a name and kind, with the job variables of pools/KIND.yaml. Raises ConfigError for a wrong argument."""
    kinds = [file.stem for file in sorted((FILES / "pools").glob("*.yaml"))]
    if kind not in kinds:
        raise ConfigError(
            "is no kind of work pool", where=f"--type {kind}", remedy=f"give one of {', '.join(kinds)}"
        )
    if (image is None) != (kind == "process"):
        raise ConfigError(
            "runs are processes there" if image else "runs are containers there",
            where=f"--type {kind}",
            remedy="leave --image out" if image else "name an image that has millrace: --image IMAGE",
        )
    variables = yaml.safe_load((FILES / "pools" / f"{kind}.yaml").read_text())
    words = {"FOLDER": folder, "IMAGE": image or ""}
    return {"name": name, "kind": kind, "variables": _filled(variables, words)}


def all_deployments(files: Sequence[Path], with_recipes: bool = False) -> list[Described]:
    """The deployments of prefect.yaml, of files and, if asked for, of recipes.

    Raises ConfigError for a file that is no configuration, and for two deployments of one name.
    """
    for_any_run: list[Described] = [
        {
            "name": item["name"],
            "entrypoint": item["entrypoint"],
            "description": _with_buttons(item["description"]) if is_run(item) else item["description"],
            "tags": item["tags"],
            "parameters": {},
        }
        for item in yaml.safe_load((FILES / "prefect.yaml").read_text())["deployments"]
    ]
    recipes = sorted((FILES / "recipes").glob("*.yaml")) if with_recipes else []
    described = [*for_any_run, *map(of_recipe, recipes), *map(of_file, files)]
    names = list(map(shown_name, described))
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "there are two deployments of that name", where=name, remedy="change run.name of the file"
            )
    return described


def of_recipe(path: Path) -> Described:
    """The deployment of a recipe: a form that is filled in with the recipe's values, and with defaults elsewhere."""
    return {
        "name": path.stem,
        "entrypoint": "millrace.flows.from_file.train_recipe",
        "description": _with_buttons("\n".join(comment_of(path))),
        "tags": _tags(load_config(str(path))),
        "parameters": {"config": read_files(str(path)), "overrides": []},
    }


def of_file(path: Path) -> Described:
    """The deployment of a user's file, by the name of its run: each flow run reads the current file."""
    config = load_config(str(path))
    return {
        "name": config.run.name,
        "entrypoint": "millrace.flows.from_file.train_file",
        "description": _with_buttons(
            f"The run of {path}, which is read when it starts. The overrides are fields as behind `millrace train`."
        ),
        "tags": _tags(config),
        "parameters": {"path": str(path), "overrides": []},
    }


def shown_name(described: Described) -> str:
    """A deployment's name in Prefect's commands: flow/name."""
    flow = described["entrypoint"].rpartition(".")[2].partition("_")[0]
    return f"{flow}/{described['name']}"


def is_run(item: Mapping[str, Any]) -> bool:
    """Whether a deployment of prefect.yaml starts runs, which have names and pages."""
    return not item["entrypoint"].endswith(".convert")


def _with_buttons(about: str) -> str:
    return f"{about}\n\n{BUTTONS}"


def _tags(config: RunConfig) -> list[str]:
    return [TAG, *sorted(run_tags(config))]


def comment_of(path: Path) -> list[str]:
    """The lines of comment at a file's start."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [line.removeprefix("#").strip() for line in lines]


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    """A YAML value with `<WORD>` in its texts replaced by words."""
    if isinstance(value, dict):
        return {name: _filled(item, words) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, words) for item in value]
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(f"<{word}>", text)
    return value
