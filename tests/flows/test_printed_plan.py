"""What `millrace check` says will happen: the algorithm, the data, a prompt, the reward, the learning rate, the run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.algorithm.presets import PRESETS
from millrace.core.config.algorithm.section import Correction, Overlong
from millrace.core.config.plan import make_plan
from millrace.core.config.reading.load import load_config
from millrace.flows.commands import app
from millrace.flows.preflight.check import Checked
from millrace.flows.preflight.plan_learning import asynchrony, learning
from millrace.flows.preflight.plan_table import plan_text
from tests.flows.test_settings_table import ROWS, bases
from tests.support.mistakes import make_wrong_place

LEARNED_BY = ("algorithm.", "filter.", "trainer.schedule.", "trainer.optimizer.lr")
ASKED_WITH = {  # how a served teacher is asked, which changes no number
    f"algorithm.teacher_server.{name}"
    for name in ("key", "concurrency", "timeout_s", "attempts", "same_tokenizer")
}


@pytest.fixture(scope="module")
def wrong_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of all tests, with 100 rows, as the page for people who start shows them."""
    return make_wrong_place(tmp_path_factory.mktemp("plan"), numbers=10)


@pytest.fixture(autouse=True)
def here(wrong_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(wrong_place)
    monkeypatch.syspath_prepend(str(wrong_place))


def plan(*overrides: str) -> dict[str, str]:
    """The lines of the plan by their names."""
    result = CliRunner().invoke(app, ["check", "run.yaml", *overrides])
    assert result.exit_code == 0, result.output
    lines: dict[str, str] = {}
    for line in result.output.splitlines()[1:]:
        name, _, text = line.partition("  ")
        lines[name or list(lines)[-1]] = (
            lines.get(name or list(lines)[-1], "") + text.strip() + "\n" * (not name)
        )
    return lines


def all_on(config: RunConfig) -> RunConfig:
    """The same with everything on that hides others while it is off."""
    a, trainer = config.algorithm, config.trainer
    on: dict[str, Any] = {"kl_coef": 0.1, "kl_target": 0.1, "aggregation": "constant", "constant_length": 7}
    on |= {"overlong": Overlong(), "correction": Correction(kind="truncate")}
    own = config.filter.group_filter or UserFunction(function="my_filters:check")
    filtering = {"drop_zero_variance": True, "reward_band": (0.1, 0.9), "group_filter": own}
    schedule = trainer.schedule.model_copy(update={"kind": "cosine", "decay_steps": 5})
    return config.model_copy(
        update={
            "algorithm": a.model_copy(update=on),
            "filter": config.filter.model_copy(update=filtering),
            "trainer": trainer.model_copy(update={"schedule": schedule}),
        }
    )


def another(section: Any, path: list[str]) -> Any:
    """A copy in which the value at the path is another one of its type."""
    if path:
        return section.model_copy(update={path[0]: another(getattr(section, path[0]), path[1:])})
    if isinstance(section, bool):
        return not section
    if isinstance(section, int | float):
        return 2 * section + 1
    others = {"grpo": "dapo", None: 3, (1.0, 1.05): (2.0, 3.0), (0.1, 0.9): (0.2, 0.8)}
    return {"scale": 2} if isinstance(section, dict) else others.get(section, "another")


@pytest.mark.parametrize(
    "path", [path for path in ROWS if path.startswith(LEARNED_BY) and path not in ASKED_WITH]
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_every_field_of_what_is_learned_by_is_shown(path: str) -> None:
    before = all_on(bases()[path])
    assert list(learning(before)) != list(learning(another(before, path.split("."))))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_algorithm_is_shown_as_its_preset_resolves(preset: str) -> None:
    teacher = ["algorithm.teacher=model"] if preset == "opd" else []
    config = load_config("run.yaml", [f"algorithm.preset={preset}", *teacher])
    lines, a = dict(learning(config)), config.algorithm
    assert lines["algorithm"].startswith(f"preset {preset}")
    assert lines["advantage"].startswith(a.advantage.kind)
    assert lines["loss"].startswith(a.loss.kind)
    assert lines["aggregation"].startswith(a.aggregation)
    assert ("not whitened" in lines["advantage"]) != a.whiten
    assert (lines["KL"] == "none, and no reference model") == (a.kl_coef == 0)
    assert lines["dynamic sampling"].startswith("off")


def test_clip_range_kl_and_dynamic_sampling_are_shown_with_their_numbers() -> None:
    lines = plan(
        "algorithm.preset=dapo",
        "filter.drop_zero_variance=true",
        "algorithm.kl_coef=0.001",
        "algorithm.kl_kind=low_var",
    )
    assert lines["algorithm"] == "preset dapo, but for its kl_coef, kl_kind"
    assert "clip_low 0.2, clip_high 0.28" in lines["loss"]
    assert lines["KL"] == "low_var in the loss, coefficient 0.001; the reference is the initial weights"
    assert (
        "on: groups whose rewards are all equal are dropped, and up to 16 prompts"
        in lines["dynamic sampling"]
    )
    assert lines["learning rate"] == "1e-06, then constant to the end (step 8)"


def test_dynamic_sampling_names_the_groups_that_are_dropped() -> None:
    lines = plan(
        "filter.reward_band=[0.1, 0.9]",
        "filter.max_truncated_share=0.5",
        "filter.max_mean_response_tokens=12",
    )
    assert lines["dynamic sampling"].startswith(
        "on: groups whose mean reward is outside 0.1 to 0.9 or with more than 0.5 of the responses truncated or of more than "
        "12 tokens a response are dropped"
    )


def test_the_learning_rate_has_its_peak_warm_up_and_end() -> None:
    schedule = [
        "trainer.schedule.kind=cosine",
        "trainer.schedule.warmup_steps=2",
        "trainer.schedule.min_lr=1e-8",
    ]
    lines = plan(*schedule, "trainer.optimizer.lr=2e-6")
    assert lines["learning rate"] == "2 steps of warm-up to 2e-06, then cosine to 1e-08 at step 8"


def test_sources_have_rows_shares_and_their_first_unusable_row() -> None:
    more = "{name: more, path: mostly.jsonl, weight: 3}"
    lines = plan(
        f"data.sources=[{{name: sums, path: train.jsonl}}, {more}]", "data.max_quarantined_share=0.7"
    )
    assert (
        lines["data sums"]
        == "train.jsonl: 100 rows, 0.25 of the prompts, an epoch of them is 50 iterations; all usable"
    )
    assert lines["data more"] == (
        "mostly.jsonl: 10 rows, 0.75 of the prompts, an epoch of them is 0.667 iterations; "
        "6 unusable, the first is row 4 (from 0): missing key: prompt"
    )
    assert lines["evaluation held_out"] == (
        "train.jsonl: 100 rows; all usable; answered greedily, 1 a prompt, at most 16 tokens"
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "none: each iteration is generated by the newest weights"),
        (["pipeline.ahead=1"], "up to 1 iteration open ahead of the trained one; no token is trained more than 1 "
         "weight version after it was made; requests under way at an update: resend"),
        (["pipeline.ahead=1", "pipeline.max_staleness=3", "pipeline.select=finish", "pipeline.reserve=0.5"],
         "more than 3 weight versions after it was made; requests under way at an update: resend; 0.5 times the prompts generate "
         "beside those of the batch, the first that finish fill it, and a group may be deferred 2 times"),
    ],
)  # fmt: skip
def test_how_far_generation_is_ahead_is_shown(overrides: list[str], text: str) -> None:
    config = load_config("run.yaml", overrides)
    ((name, shown),) = asynchrony(config)
    assert name == "asynchrony"
    assert text in shown


@pytest.mark.parametrize(
    ("sampling", "length", "warned"),
    [(None, 32, False), ({"temperature": 1.0}, 32, False), ({"max_new_tokens": 8}, 8, True), ({"max_new_tokens": 64}, 64, False)],
)  # fmt: skip
def test_a_held_out_sets_answers_are_as_long_as_the_rollouts_and_the_plan_says_how_they_are_sampled(
    sampling: dict[str, float] | None, length: int, warned: bool
) -> None:
    given = {} if sampling is None else {"sampling": sampling}
    sets = json.dumps([{"name": "held_out", "path": "train.jsonl", **given}])
    shown = plan(f"evaluation.sets={sets}", "rollout.sampling.max_new_tokens=32")["evaluation held_out"]
    how = "at temperature 1" if sampling == {"temperature": 1.0} else "greedily"
    assert f"answered {how}, 1 a prompt, at most {length} tokens" in shown
    assert ("the rollout's are at most 32" in shown) is warned


def test_rows_that_are_too_long_or_lack_the_label_are_counted() -> None:
    lines = plan(
        "data.sources.sums.path=lengthy.jsonl", "data.max_prompt_tokens=12", "data.max_quarantined_share=0.7"
    )
    assert "6 unusable, the first is row 4 (from 0): too long: 38 tokens" in lines["data sums"]
    assert "1 unusable, the first is row 4" in plan("data.sources.sums.path=some_labels.jsonl")["data sums"]


def test_of_a_large_file_the_first_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.flows.preflight.first_rows.ROWS", 10)
    for name in ("train.jsonl", "train.parquet"):
        lines = plan(f"data.sources.sums.path={name}")
        assert "about 100 rows, of which the first 10 were read" in lines["data sums"], name
    monkeypatch.setattr("millrace.flows.preflight.first_rows.BYTES", 500)
    assert "about 100 rows, of which the first 10 were read" in plan()["data sums"]


def test_the_text_that_is_sent_is_shown_with_its_tokens_and_label() -> None:
    prompt = plan("data.sources.sums.system=Be brief.")["a prompt"]
    assert (
        prompt
        == "row 0 of sums, 16 tokens, label '0'. The text that is sent:<system>Be brief.<user>0+0=<assistant>\n"
    )
    assert "tokens, label '0'" in plan("data.sources.sums.chat=false")["a prompt"]


def test_the_rewards_answers_are_shown() -> None:
    assert plan()["reward"] == (
        "millrace.core.rewards.text:exact_match gives on row 0 of sums: 1 (found '0') for the label as response; "
        "0 (found no answer) for an empty text as response"
    )
    parts = plan("reward.function=rewards_of_a_newcomer:slowly")["reward"]
    assert "1 (format 0.5) for the label as response" in parts


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "new; 4 iterations"),
        (["run.name=trained"], "exists, 3 of 4 iterations complete; goes on with iteration 4 of 4 from checkpoint 2; "
         "iteration 3 is trained again from the stored batches"),
        (["run.name=trained", "run.iterations=3"], "exists, complete: 3 iterations; raise run.iterations to train more"),
    ],
    ids=["new", "open", "complete"],
)  # fmt: skip
def test_whether_the_run_exists_and_where_it_goes_on(overrides: list[str], text: str) -> None:
    assert plan(*overrides)["run"] == text


def test_a_branch_that_was_not_started_is_one() -> None:
    from millrace.connectors.storage.run_folder import RunFolder
    from millrace.flows.driver.stored_run import run_record

    record = run_record("runs", "trained")
    branch = {
        **record,
        "name": "twig",
        "config": None,
        "parent": {"run": "trained", "at": 2, "config": record["config"]},
    }
    RunFolder("runs", "twig").store.write_sealed("run.json", branch)
    assert plan("run.name=twig", "trainer.optimizer.lr=1e-5")["run"].startswith(
        "a branch of trained, not started yet"
    )
    refused = CliRunner().invoke(
        app, ["check", "run.yaml", "run.name=twig", "model.dtype=bfloat16"], env={"COLUMNS": "300"}
    )
    assert "model.dtype = 'bfloat16': its parent trained has 'float32'" in refused.output


def test_a_supervised_plan_has_neither_reward_nor_advantage() -> None:
    lines = plan("algorithm.loss=sft", "rollout.samples_per_prompt=1", "trainer.global_batch=8")
    assert lines["algorithm"].startswith("supervised")
    assert not {"reward", "advantage", "KL", "dynamic sampling"} & set(lines)


def test_a_terminal_wraps_lines_and_a_pipe_gets_them_whole() -> None:
    config = load_config("run.yaml")
    narrow, piped = (plan_text(make_plan(config), Checked(config, [], []), width) for width in (80, None))
    assert max(map(len, narrow.splitlines())) <= 80
    assert max(map(len, piped.splitlines())) > 120
    assert "".join(narrow.split()) == "".join(piped.split())


def test_the_page_for_people_who_start_shows_the_plan_as_it_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    (shown,) = [
        block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if block.startswith("run mine")
    ]
    printed = CliRunner().invoke(app, ["check", "run.yaml", "run.name=mine"]).output
    assert printed.startswith(shown)


def test_a_shell_that_stands_elsewhere_is_told_where_the_runs_folder_is(
    wrong_place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in a file means the file's folder, and storage.root the shell's."""
    file = str(wrong_place / "run.yaml")

    def told(*overrides: str) -> str:
        printed = CliRunner().invoke(app, ["check", file, *overrides]).output
        return printed.partition("run folder")[2].partition("weights")[0]

    assert told("run.name=trained") == ""
    monkeypatch.chdir(tmp_path)
    assert f"{tmp_path}/runs/trained:" in told("run.name=trained", "storage.root=runs")
    assert f"storage.root={wrong_place}/runs" in told("run.name=trained", "storage.root=runs")
    assert "WARNING" not in told("run.name=new", "storage.root=runs")
    assert f"{tmp_path}/runs/new:" in told("run.name=new", "storage.root=runs")
    for root in (f"{tmp_path}/other", f"{wrong_place}/runs", "memory://runs"):
        assert told("run.name=trained", f"storage.root={root}") == ""
    shutil.rmtree(tmp_path / "runs")  # made by the check that it can be written
    (tmp_path / "runs").symlink_to(wrong_place / "runs")
    assert "WARNING" not in told("run.name=trained", "storage.root=runs")
    (tmp_path / "link").symlink_to(wrong_place)
    monkeypatch.chdir(tmp_path / "link")
    assert told("run.name=trained") == ""
