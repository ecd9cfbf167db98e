"""What `millrace deploy` gives to Prefect: a deployment for each recipe and file, job variables that workers know, automations."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import jsonschema
import prefect.states
import pytest
import yaml
from prefect.settings.models.flows import FlowsSettings

from millrace.connectors.prefect.server import CLIENT_SETTINGS
from millrace.core.config import RunConfig
from millrace.core.config.reading.load import load_config
from millrace.core.errors import ConfigError
from millrace.core.tracker import run_tags, with_run_tags
from millrace.flows import from_file, sft, train
from millrace.flows.commands.deploy import (
    BUTTONS,
    FILES,
    TAG,
    all_deployments,
    deploy_all,
    pool_of,
    shown_name,
)
from millrace.flows.from_file import name_of_file

RECIPES = sorted((FILES / "recipes").glob("*.yaml"))
POOLS = ("docker", "kubernetes", "process")
HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"


@pytest.fixture(scope="module")
def deployments() -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in all_deployments([], with_recipes=True)}


def automation(end: str) -> dict[str, Any]:
    listed = yaml.safe_load((FILES / "automations.yaml").read_text())["automations"]
    (found,) = [item for item in listed if item["name"].endswith(end)]
    trigger: dict[str, Any] = found["trigger"]
    assert trigger["posture"] == "Proactive"
    return trigger


def test_there_are_four_for_any_run_and_one_for_each_recipe_when_asked(
    deployments: dict[str, Any], tmp_path: Path
) -> None:
    assert set(deployments) == {"train", "file", "sft", "convert", *(path.stem for path in RECIPES)}
    assert [shown_name(item) for item in all_deployments([])] == [
        "train/train",
        "train/file",
        "sft/sft",
        "convert/convert",
    ]
    own = tmp_path / "own.yaml"
    own.write_text(f"base: {RECIPES[0]}\nrun: {{name: mine}}\n")
    assert [item["name"] for item in all_deployments([own])] == ["train", "file", "sft", "convert", "mine"]


@pytest.mark.parametrize(
    ("text", "overrides", "wanted"),
    [
        ("run: {name: a}", (), "a"),
        ("run: {name: a}", ("run.iterations=3",), "a"),
        ("run: {name: a}", ("run.name=b",), "b"),
        ("run: {name: a}", ("run.name=b", "run.name=c"), "c"),
        ("run: {seed: 1}", ("run.name=b",), "b"),
        ("base: other.yaml", (), "other"),
        ("base: other.yaml\nrun: {name: a}", (), "a"),
        ("run: {seed: 1}", (), "run.yaml"),
        ("run:", (), "run.yaml"),
        ("[", (), "run.yaml"),
        (None, (), "run.yaml"),
    ],
)
def test_a_flow_run_of_a_file_is_named_by_its_run(
    text: str | None, overrides: tuple[str, ...], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("run: {name: other}")
    if text is not None:
        Path("run.yaml").write_text(text)
    assert name_of_file({"path": "run.yaml", "overrides": overrides}) == wanted


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_form_of_a_recipe_is_filled_in_with_what_it_says(path: Path, deployments: dict[str, Any]) -> None:
    made, config = deployments[path.stem], load_config(str(path))
    assert made["entrypoint"] == "millrace.flows.from_file.train_recipe"
    given = made["parameters"]
    jsonschema.validate(given["config"], RunConfig.model_json_schema())
    assert RunConfig.model_validate(given["config"]) == config
    assert given["overrides"] == []
    assert set(made["tags"]) == {TAG, *run_tags(config)}
    assert made["description"].splitlines()[0] == path.read_text().splitlines()[0].removeprefix("# ")


def test_every_description_of_a_run_says_how_a_run_is_named_and_that_nothing_resumes_by_itself(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.yaml"
    values = {"run": {"name": "b"}, "model": {"path": "m"}, "data": {"sources": [{"path": "p"}]}}
    file.write_text(yaml.safe_dump({**values, "reward": {"function": "a:b"}}))
    made = all_deployments([file], with_recipes=True)
    assert {item["name"] for item in made} >= {"train", "file", "sft", "b", *(path.stem for path in RECIPES)}
    for item in [item for item in made if item["name"] != "convert"]:
        about, _, buttons = item["description"].rpartition("\n\n")
        assert about
        assert buttons == BUTTONS


def test_overrides_of_a_recipe_are_set_as_behind_the_file(deployments: dict[str, Any]) -> None:
    given = {**deployments["dapo"]["parameters"], "overrides": ["algorithm.preset=gspo", "run.iterations=3"]}
    recipe = FILES / "recipes" / "dapo.yaml"
    assert from_file.with_overrides(given) == load_config(str(recipe), given["overrides"])


def test_a_file_of_the_users_has_one_by_the_name_of_its_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    values = {"run": {"name": "b"}, "model": {"path": "m"}, "data": {"sources": [{"path": "p"}]}}
    file.write_text(yaml.safe_dump({**values, "reward": {"function": "a:b"}}))
    *_, made = all_deployments([file])
    assert (made["name"], made["parameters"]) == ("b", {"path": str(file), "overrides": []})
    assert set(made["tags"]) == {TAG, "run:b", "model:m", "preset:grpo"}
    with pytest.raises(ConfigError, match=r"train/b: there are two"):
        all_deployments([file, file])


@pytest.mark.parametrize(
    ("kind", "image", "says"),
    [
        ("ecs", None, "--type ecs: is no kind of work pool; give one of docker, kubernetes, process"),
        ("docker", None, "--type docker: runs are containers there; name an image"),
        ("process", "i", "--type process: runs are processes there; leave --image out"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(kind: str, image: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        deploy_all(tmp_path, kind=kind, image=image)


@pytest.mark.parametrize("kind", POOLS)
def test_job_variables_of_a_pool_are_those_that_its_worker_knows(kind: str) -> None:
    """By the schemas that Prefect's server has of the workers of all kinds."""
    metadata = (
        Path(prefect.__file__).parent / "server/api/collections_data/views/aggregate-worker-metadata.json"
    )
    of_workers = {
        name: worker for group in json.loads(metadata.read_text()).values() for name, worker in group.items()
    }
    schema = of_workers[kind]["default_base_job_configuration"]["variables"]
    variables = pool_of("mine", kind, "/some/folder", None if kind == "process" else "an-image")["variables"]
    assert set(variables) <= set(schema["properties"])
    assert "<" not in json.dumps(variables)
    assert variables.get("image") == (None if kind == "process" else "an-image")
    jsonschema.validate(variables, schema)
    assert variables["env"]["PREFECT_LOGGING_EXTRA_LOGGERS"] == "millrace"


def test_there_are_job_variables_for_each_kind_of_pool_and_prefect_yaml_has_those_of_processes() -> None:
    assert {file.stem for file in (FILES / "pools").glob("*.yaml")} == set(POOLS)
    variables = yaml.safe_load((FILES / "pools" / "process.yaml").read_text())
    listed = yaml.safe_load((FILES / "prefect.yaml").read_text())["deployments"]
    assert all(item["work_pool"]["job_variables"] == variables for item in listed)
    assert all(item["tags"] == [TAG] for item in listed)


def test_a_run_that_lives_shows_it_three_times_before_it_is_taken_for_lost() -> None:
    """However it was started: by a worker, a command, in a checkout, or from Python with no setting at all."""
    within = automation("mark lost runs")["within"]
    by_worker = [
        yaml.safe_load((FILES / "pools" / f"{kind}.yaml").read_text())["env"][HEARTBEAT] for kind in POOLS
    ]
    checkout = (FILES.parent / "connectors" / "prefect" / "prefect.toml").read_text()
    (in_checkout,) = [
        line.split()[2] for line in checkout.splitlines() if line.startswith("heartbeat_frequency")
    ]
    unset = FlowsSettings.model_fields["heartbeat_frequency"].default
    for seconds in (*by_worker, CLIENT_SETTINGS[HEARTBEAT], in_checkout, unset):
        assert 3 * int(seconds) < within


def test_no_state_in_which_a_run_may_rest_is_taken_for_a_loss() -> None:
    states = [prefect.states.Completed(), prefect.states.Failed(), prefect.states.Crashed()]
    states += [prefect.states.Cancelled(), prefect.states.Paused(), prefect.states.Suspended()]
    resting = {state.name for state in states} | {"TimedOut", "Refused"}
    trigger = automation("mark lost runs")
    assert {f"prefect.flow-run.{name}" for name in resting} <= set(trigger["expect"])
    assert {"prefect.flow-run.heartbeat", "millrace.flow-run.left"} <= set(trigger["expect"])
    watched = set(trigger["match_related"]["prefect.resource.name"])
    assert {train.train.name, sft.sft.name, from_file.train_file.name, from_file.train_recipe.name} <= watched
    assert watched == {"train", "sft", "iteration", "sft_iteration"}


def test_only_a_run_that_stays_pending_is_submitted_again() -> None:
    """Each state of another kind that Prefect has, and those of the project and of the server, end the wait."""
    made = vars(prefect.states).items()
    states = [make() for name, make in made if name[0].isupper() and inspect.isfunction(make)]
    others = {state.name for state in states if not state.is_pending()} | {"TimedOut", "Refused", "Resuming"}
    trigger = automation("submit runs again")
    assert trigger["after"] == [f"prefect.flow-run.{prefect.states.Pending().name}"]
    assert set(trigger["expect"]) == {f"prefect.flow-run.{name}" for name in others}
    assert len(others) > 12


def test_the_tags_of_a_recipe_make_way_for_those_of_the_run() -> None:
    had = [TAG, "mine", "run:dapo", "preset:dapo", "model:warm-model"]
    of_run = {"run:b", "preset:grpo", "model:warm-model"}
    assert with_run_tags(had, of_run) == sorted({TAG, "mine", *of_run})
