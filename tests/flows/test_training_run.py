"""The training run on real parts: Prefect server, Ray actors, Megatron ranks, an engine over HTTP, MLflow on SQLite."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.flows.commands.show import run_listing
from tests.core.contracts.test_task_records import TYPES, mismatches
from tests.soak.points import TASKS
from tests.support.flow_runs import MALFORMED, Workplace, final_weights, trained
from tests.support.metric_names import unexplained

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}  # in every layer


def test_every_task_leaves_its_files_and_the_manifest_names_them(whole: Path) -> None:
    for index in range(3):
        folder = whole / "iterations" / f"{index:06d}"
        manifest = json.loads((folder / "manifest.json").read_text())
        named = {entry["path"] for entry in manifest["files"]}
        here = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert here - named == {"manifest.json", "results/publish.json"}
        assert named <= here
        assert {Path(name).stem for name in here if name.startswith("results/")} >= set(TASKS)
        assert manifest["tasks"]["trained_version"] == 2 * (index + 1)


def test_every_record_is_as_its_type_says(whole: Path) -> None:
    for path in sorted(whole.glob("iterations/*/results/*.json")):
        record = json.loads(json.loads(path.read_text())["result"])
        assert mismatches(record, TYPES[path.stem], path.stem) == []


def test_what_rounding_makes_of_the_model_is_in_the_runs_record_and_shown(whole: Path) -> None:
    manifests = [json.loads(path.read_text()) for path in sorted(whole.glob("iterations/*/manifest.json"))]
    floors = [manifest["tasks"]["metrics"]["train/logprob_gap_floor"] for manifest in manifests]
    assert 0 < floors[-1] < 0.01
    assert json.loads((whole / "run.json").read_text())["logprob_gap_floor"] in floors
    shown = run_listing(str(whole.parent), "a").facts["rounding"]
    assert shown.startswith(f"{floors[-1]:.3g} nats a token; engine and trainer may differ by ")


def test_each_sample_trains_one_step_with_what_it_was_generated_by(whole: Path) -> None:
    pairs = trained(whole)
    assert len(pairs) == len(set(pairs)) == 3 * 32
    assert [step for _, step in pairs] == sorted(step for _, step in pairs)
    assert {step for _, step in pairs} == set(range(1, 7))
    for index in range(3):
        rows = pq.read_table(whole / "iterations" / f"{index:06d}" / "batch.parquet").to_pylist()
        assert all(row["policy_versions"] == [{"first_token": 0, "version": 2 * index}] for row in rows)
        assert all(len(row["rollout_logprobs"]) == row["response_length"] for row in rows)


def test_engine_and_trainer_agree_and_the_weights_move(workplace: Workplace, whole: Path) -> None:
    steps = [
        json.loads((whole / "iterations" / f"{i:06d}" / "step.json").read_text())["steps"] for i in range(3)
    ]
    assert all(found[0]["logprob_gap_max"] < 1e-3 for found in steps)
    assert all(step["grad_norm"] > 0 for found in steps for step in found)
    assert final_weights(whole) != (workplace.folder / "model" / "model.safetensors").read_bytes()


def test_checkpoints_exports_and_evaluations_are_there_when_due(whole: Path) -> None:
    checkpoints = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert checkpoints == ["000002", "000003"]
    assert all((whole / "checkpoints" / name / "complete.json").exists() for name in checkpoints)
    assert [path.name for path in (whole / "exports").iterdir()] == ["000003"]
    evaluated = sorted(path.name for path in (whole / "eval" / "held_out").iterdir())
    assert evaluated == ["000000.parquet", "000002.parquet", "000003.parquet"]


def test_an_export_is_a_hugging_face_model(whole: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = whole / "exports" / "000003"
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(folder)("1+1=").input_ids


def test_a_complete_run_that_is_started_again_does_nothing(workplace: Workplace, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    assert "3 iterations complete, 0 of them now" in workplace.train(whole.parent)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before


def test_every_metric_of_a_run_is_explained(whole: Path) -> None:
    manifests = [json.loads(path.read_text()) for path in (whole / "iterations").glob("*/manifest.json")]
    names = {name for manifest in manifests for name in manifest["tasks"]["metrics"]}
    assert "eval/held_out/reward_mean" in names
    assert unexplained(names) == []
    assert unexplained(["train/of_yours", "eval/held_out/of_yours"]) == [
        "eval/held_out/of_yours",
        "train/of_yours",
    ]


def test_mlflow_holds_the_curves_and_links_to_prefect(workplace: Workplace, whole: Path) -> None:
    from mlflow.tracking import MlflowClient

    record = json.loads((whole / "run.json").read_text())
    client = MlflowClient(f"sqlite:///{workplace.folder / 'home' / 'mlflow.db'}")
    run = client.get_run(record["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["rollout.prompts"] == "8"
    same = "params.`rollout.prompts` = '8' and params.`algorithm.preset` = 'grpo'"
    found = client.search_runs([run.info.experiment_id], same)
    assert run.info.run_id in [one.info.run_id for one in found]
    assert record["attempts"][-1]["flow_run_id"] == run.data.tags["prefect.flow_run_id"]
    for name in (
        "reward/mean", "train/loss", "train/logprob_gap_mean", "rollout/response_length_mean",
        "rollout/truncated_share", "rollout/tokens_per_second", "0_overview/reward",
        "time/rollout_s", "time/train_step_s", "time/sync_weights_s",
    ):  # fmt: skip
        assert [point.step for point in client.get_metric_history(run.info.run_id, name)] == [1, 2, 3], name
    assert client.get_metric_history(run.info.run_id, "staleness/mean") == []  # it was 0 all the time
    assert [p.step for p in client.get_metric_history(run.info.run_id, "eval/held_out/reward_mean")] == [
        0,
        2,
        3,
    ]
    assert "curves.png" in [file.path for file in client.list_artifacts(run.info.run_id)]
    traces = client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)
    first = [trace for trace in traces if trace.info.tags["millrace.iteration"] == "1"]
    assert len(first) == 16
    assert {span.name for trace in first for span in trace.data.spans} >= {"turn", "reward"}
    assert all(trace.info.tags["millrace.view"].startswith("millrace view a ") for trace in first)


def test_one_iteration_has_traces_of_ranks_and_engines(whole: Path) -> None:
    assert [folder.name for folder in (whole / "traces").iterdir()] == ["000001"]
    files = sorted((whole / "traces" / "000001").iterdir())
    assert [file.name for file in files] == [
        "engine-0.trace.json.gz",
        "trainer-0-step-3.trace.json.gz",
        "trainer-0-step-4.trace.json.gz",
    ]
    for file in files:
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert any(event.get("name") in PRODUCTS and event["dur"] > 0 for event in events), file.name
    assert run_listing(str(whole.parent), "a").facts["traces"] == "of iterations 2"


def test_show_has_tokens_a_second_by_phase_and_says_why_it_has_no_mfu(whole: Path) -> None:
    shown = run_listing(str(whole.parent), "a")
    assert shown.facts["MFU"].startswith("not computed: on a CPU")
    titles = ("tokens/s", "scored/s", "trained/s")
    assert {"MFU", "GPU busy"}.isdisjoint(shown.columns)
    for row in shown.rows[1:]:
        assert all(row[shown.columns.index(title)] > 0 for title in titles)


def test_prefect_holds_the_flow_runs_and_artifacts(workplace: Workplace, whole: Path) -> None:
    runs = workplace.ask("/flow_runs/filter", {"flow_runs": {"name": {"like_": "a, iteration "}}})
    assert {run["name"] for run in runs if run["state_type"] == "COMPLETED"} >= {
        "a, iteration 1",
        "a, iteration 2",
        "a, iteration 3",
    }
    assert {tuple(run["parameters"]) for run in runs} == {("index",)}  # and nothing of prompts or weights
    kinds = {artifact["type"] for artifact in workplace.ask("/artifacts/filter", {})}
    assert {"progress", "markdown", "image"} <= kinds
    record = json.loads((whole / "run.json").read_text())
    query = {"logs": {"flow_run_id": {"any_": [record["attempts"][-1]["flow_run_id"]]}}}
    lines = [line["message"] for line in workplace.ask("/logs/filter", query)]
    assert "run a is complete: 3 iterations" in lines
    assert any(line.startswith("iteration 3 of 3: reward") for line in lines)


def test_on_gpus_of_its_own_the_trainer_is_saved_after_the_sync(workplace: Workplace, whole: Path) -> None:
    for iteration in (1, 2):  # none is due, and one is
        of_iteration = {"flow_runs": {"name": {"any_": [f"a, iteration {iteration}"]}}}
        done = [
            (run["flow_run_id"], run["name"].split("-")[0], run["start_time"], run["end_time"])
            for run in workplace.ask("/task_runs/filter", of_iteration)
            if run["state_type"] == "COMPLETED"
        ]
        synced = {flow: ended for flow, task, _, ended in done if task == "sync_weights"}
        saved = {flow: started for flow, task, started, _ in done if task == "checkpoint"}
        # other runs of the workplace have this name too
        both = synced.keys() & saved.keys()
        assert both
        assert all(saved[flow] > synced[flow] for flow in both)


def test_malformed_prompts_are_quarantined_with_their_reasons_and_counted(
    workplace: Workplace, whole: Path
) -> None:
    rows = pq.read_table(whole / "quarantine.parquet").to_pylist()
    assert sorted(row["reason"].split(":")[0] for row in rows) == sorted(reason for _, reason in MALFORMED)
    assert {row["source"] for row in rows} == {"sums"}
    assert json.loads((whole / "run.json").read_text())["quarantined"]["sums"] == len(MALFORMED)
    shown = workplace.call("show", "a", "--root", str(whole.parent), COLUMNS="200")
    assert f"{len(MALFORMED)} rows of sums" in shown


def test_runs_and_show_list_it_with_iterations_counted_from_one(workplace: Workplace, whole: Path) -> None:
    listed = workplace.call("runs", "--root", str(whole.parent))
    (row,) = [line for line in listed.splitlines() if line.startswith("│")]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert (cells[:3], cells[-1]) == (["a", "3", "3"], "complete")
    shown = workplace.call("show", "a", "--root", str(whole.parent), COLUMNS="200")
    assert str(whole) in shown
    first_cells = [line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")]
    assert [cell for cell in first_cells if cell.isdigit()] == ["0", "1", "2", "3"]  # 0: before training
    assert "no such run" in workplace.call("show", "b", "--root", str(whole.parent), expect=2)


def files(run: Path) -> dict[Path, int]:
    """When each file of a run was written, but for those of its lease."""
    found = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "lease"]
    return {path: path.stat().st_mtime_ns for path in found}


def test_another_configuration_under_the_same_name_is_refused_and_leaves_nothing(
    workplace: Workplace, whole: Path
) -> None:
    before = files(whole)
    changed = ["run.iterations=4", "rollout.sampling.temperature=0.5"]
    out = workplace.train(whole.parent, *changed, expect=2, COLUMNS="400")
    assert "rollout.sampling.temperature = 0.5: run a has 1.0, and it may not change" in out
    assert f"`millrace branch a NEW --at 3 --root {whole.parent}`" in out
    assert files(whole) == before


def test_data_that_changed_under_the_run_is_refused_and_leaves_nothing(
    workplace: Workplace, whole: Path
) -> None:
    source, before = workplace.folder / "train.jsonl", files(whole)
    text = source.read_text()
    source.write_text(text.replace("1+1=", "1 + 1 ="))
    try:
        out = workplace.train(whole.parent, "run.iterations=4", expect=2)
    finally:
        source.write_text(text)
    assert "data.sources.sums.path" in out
    assert "data.allow_changes=true" in out
    assert files(whole) == before


@pytest.mark.slow
def test_a_run_resumes_with_other_data_when_that_is_allowed(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "a")
    text = (workplace.folder / "train.jsonl").read_text()
    (workplace.folder / "more.jsonl").write_text(text + json.dumps({"prompt": "9+9+1=", "label": "9"}) + "\n")
    workplace.train(tmp_path, "run.iterations=4", "data.allow_changes=true", "data.sources.0.path=more.jsonl")
    assert [span["since"] for span in json.loads((tmp_path / "a" / "run.json").read_text())["data"]] == [0, 3]
    assert "nothing is wrong" in workplace.call("verify", "a", "--root", str(tmp_path))


@pytest.mark.slow
def test_a_refused_step_names_its_limit_and_with_another_limit_the_run_resumes_from_what_was_generated(
    workplace: Workplace, whole: Path, tmp_path: Path
) -> None:
    out = workplace.train(tmp_path, "sync.max_logprob_gap=1e-12", expect=2)
    assert out.count("RefusedStepError: step 1: engine and trainer disagree") == 1
    assert "Failed to write result" not in out
    assert out.count("raise sync.max_logprob_gap") == 1
    assert "Traceback" not in out
    assert out.count("discard a --from 1") == 1
    parts = tmp_path / "a" / "iterations" / "000000" / "rollouts"
    generated = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert generated
    assert "3 iterations complete, 3 of them now" in workplace.train(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in parts.iterdir()} == generated
    assert trained(tmp_path / "a") == trained(whole)
