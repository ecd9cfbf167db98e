"""Wrong configurations: each is answered before anything starts, names its field, and fits one screen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from flow_runs import configuration

from connectors.huggingface.tiny import build_tiny_model
from core.config.load import load_config
from core.config.problems import render_problems
from core.errors import ConfigError
from flows.check import check

HEAVY = ("torch", "prefect", "ray", "mlflow", "megatron", "transformers")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    build_tiny_model(folder / "model", seed=0)
    rows = [{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    (folder / "chat.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "label": "2"}) + "\n"
    )
    (folder / "other.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "bad.jinja").write_text("{% for message in messages %}{{ message.content }}")
    (folder / "silent.jinja").write_text("hello")
    (folder / "not-a-folder").write_text("")
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return folder


def answer(place: Path, *overrides: str, text: str | None = None) -> str:
    """What the check says of the configuration with these overrides."""
    before = Path.cwd()
    os.chdir(place)
    try:
        config = load_config(None, overrides, text=text or yaml.safe_dump(configuration()))
        problems = check(config)
        return render_problems(problems) if problems else ""
    except ConfigError as error:
        return str(error)
    finally:
        os.chdir(before)


def test_the_configuration_that_the_wrong_ones_come_from_is_right(place: Path) -> None:
    assert answer(place) == ""


WRONG: list[tuple[str, list[str], str, str]] = [
    ("unknown key", ["rollout.promts=4"], "rollout.promts", "did you mean prompts?"),
    ("unknown section", ["rolout.prompts=4"], "rolout", "did you mean rollout?"),
    ("wrong type", ["rollout.prompts=many"], "rollout.prompts", "integer"),
    ("negative", ["trainer.optimizer.lr=-1"], "trainer.optimizer.lr", "greater than 0"),
    ("bad run name", ["run.name=My Run"], "run.name", "match"),
    ("unknown preset", ["algorithm.preset=grpoo"], "algorithm", "grpo"),
    ("batch does not divide", ["trainer.global_batch=15"], "trainer.global_batch", "take one of"),
    ("ranks do not divide", ["trainer.world_size=3", "trainer.parallel.tensor=2"], "trainer.world_size", "set it to 4"),
    ("heads do not divide", ["trainer.world_size=5", "trainer.parallel.tensor=5"], "trainer.parallel.tensor", "divisor"),
    ("layers do not divide", ["trainer.world_size=3", "trainer.parallel.pipeline=3"], "trainer.parallel.pipeline", "divisor"),
    ("sequence without tensor", ["trainer.parallel.sequence=true"], "trainer.parallel.sequence", "tensor"),
    ("no experts", ["trainer.world_size=2", "trainer.parallel.expert=2"], "trainer.parallel.expert", "set it to 1"),
    ("pack too small", ["trainer.max_pack_tokens=40"], "trainer.max_pack_tokens", "48 or more"),
    ("cache too small", ["engines.max_total_tokens=40"], "engines.max_total_tokens", "48 or more"),
    ("too long for the model", ["rollout.sampling.max_new_tokens=100000"], "rollout.sampling.max_new_tokens", "positions"),
    ("group of one", ["rollout.samples_per_prompt=1", "rollout.prompts=32"], "rollout.samples_per_prompt", "2 or more"),
    ("greedy rollout", ["rollout.sampling.temperature=0"], "rollout.sampling.temperature", "above 0"),
    ("no model", ["model.path=nowhere"], "model.path", "no such folder"),
    ("no architecture of ours", ["model.path=bert"], "model.path", "qwen3"),
    ("no teacher", ["algorithm.preset=opd", "algorithm.teacher=nowhere"], "algorithm.teacher", "checkpoint folder"),
    ("no data", ["data.sources.0.path=nowhere.jsonl"], "data.sources.0.path", "correct the source's path"),
    ("unknown format", ["data.sources.0.path=train.csv"], "data.sources.0.path", ".jsonl"),
    ("empty data", ["data.sources.0.path=empty.jsonl"], "data.sources.0.path", "no row"),
    ("no such column", ["data.sources.0.path=other.jsonl"], "data.sources.0", "prompt_key"),
    ("chat data without chat", ["data.sources.0.path=chat.jsonl", "data.sources.0.chat=false"], "data.sources.0.chat", "true"),
    ("held-out set missing", ["evaluation.sets.0.path=gone.jsonl"], "evaluation.sets.0.path", "correct the source's path"),
    ("template does not parse", ["model.chat_template=bad.jinja"], "model.chat_template", "mend the template"),
    ("template without message", ["model.chat_template=silent.jinja"], "model.chat_template", "user's message"),
    ("template missing", ["model.chat_template=gone.jinja"], "model.chat_template", "Jinja"),
    ("no such reward", ["reward.function=core.rewards.text:nothing"], "reward.function", "correct the part after the colon"),
    ("reward not importable", ["reward.function=no.such:thing"], "reward.function", "PYTHONPATH"),
    ("reward options", ["reward.options={volume: 11}"], "reward.options", "volume"),
    ("storage not writable", ["storage.root=not-a-folder/runs"], "storage.root", "may write"),
    ("sync folder missing", ["sync.directory=gone"], "sync.directory", "make it"),
    ("megatron field", ["trainer.megatron={moe_router_topkk: 2}"], "trainer.megatron.moe_router_topkk", "moe_router_topk"),
    ("warm-up too long", ["trainer.schedule.kind=cosine", "trainer.schedule.warmup_steps=99"], "trainer.schedule.warmup_steps", "lower it"),
    ("no override", ["rollout.prompts"], "rollout.prompts", "key=value"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "field", "remedy"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_a_wrong_configuration_names_field_and_remedy(
    place: Path, overrides: list[str], field: str, remedy: str
) -> None:
    said = answer(place, *overrides)
    assert field in said
    assert remedy in said
    assert len(said.splitlines()) <= 24
    assert "Traceback" not in said


def test_a_file_that_is_no_yaml_names_the_line(place: Path) -> None:
    assert "line 2" in answer(place, text="run: {name: a}\nmodel: path: x\n")


def test_all_problems_are_named_at_once(place: Path) -> None:
    said = answer(place, "model.path=nowhere", "trainer.global_batch=15", "reward.function=no.such:thing")
    assert said.startswith("3 problems")
    for field in ("model.path", "trainer.global_batch", "reward.function"):
        assert field in said


def test_what_a_function_makes_later_may_be_missing_now(place: Path) -> None:
    config = load_config(
        None, [f"storage.root={place}", "model.path=nowhere", "run.prepare=flows.quickstart:prepare"],
        text=yaml.safe_dump(configuration()),
    )  # fmt: skip
    assert not [problem for problem in check(config, made_later=True) if problem.field == "model.path"]
    assert [problem for problem in check(config) if problem.field == "model.path"]


def test_the_check_imports_nothing_heavy(place: Path) -> None:
    (place / "run.yaml").write_text(yaml.safe_dump(configuration()))
    code = (
        "import sys; from core.config.load import load_config; from flows.check import check; import flows.cli;"
        "assert check(load_config('run.yaml')) == [];"
        f"found = [name for name in {HEAVY} if name in sys.modules]; assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_command_says_it_and_starts_nothing(place: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = configuration()
    values["storage"] = {"root": str(tmp_path / "runs")}
    (place / "run.yaml").write_text(yaml.safe_dump(values))
    environment = {**os.environ, "MILLRACE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "flows.cli"]
    wrong = subprocess.run(
        [*command, "train", "run.yaml", "trainer.global_batch=15"],
        cwd=place, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "trainer.global_batch = 15" in wrong.stderr
    assert not (tmp_path / "home").exists()
    right = subprocess.run(
        [*command, "check", "run.yaml"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert right.returncode == 0, right.stderr
    assert "8 × 4 = 32" in right.stdout
