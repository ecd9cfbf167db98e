"""The examples of programs, critics and environments are run: two short iterations, and what they promise is in the stored rows.

The model is taught a few answers, so that some are right and others wrong.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from millrace.connectors.huggingface.tiny import build_tiny_model, build_tokenizer
from millrace.connectors.user_code.session_pool import SessionPool
from millrace.core.algorithms.group_advantages import group_relative
from millrace.core.config.rollout import SessionSection
from millrace.core.sessions.tree import BranchReward
from tests.examples.test_pages import ROOT, blocks
from tests.support.flow_runs import Workplace, make_workplace
from tests.support.session_driver import Driver, start

EXAMPLES = ROOT / "examples"
FOLDERS = ["code_repair", "critic", "verifiers_env"]
SHORT = [
    "run.prepare=null",
    "run.iterations=2",
    "data.sources.0.path=rows.jsonl",
    "rollout.prompts=8",
    "rollout.samples_per_prompt=4",
    "rollout.part_groups=2",
    "trainer.global_batch=16",
    "trainer.max_pack_tokens=1024",
    "checkpoint.every=2",
    "evaluation.every=2",
    "evaluation.sets.0.path=rows.jsonl",
    "evaluation.sets.0.samples_per_prompt=1",
]
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("agent-examples"))
    place.call("server", "start")
    yield place
    place.call("server", "stop")


def teach(folder: Path, asked: Sequence[str], answers: Sequence[str]) -> None:
    """Make a model at `folder` that answers each of these questions by one of these answers, about as often by each."""
    from transformers import AutoModelForCausalLM

    build_tiny_model(folder, seed=1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rng = random.Random(0)
    for _ in range(60):
        texts = [f"<user>{rng.choice(asked)}<assistant>{rng.choice(answers)}<eos>" for _ in range(16)]
        batch = TOKENIZER(texts, return_tensors="pt", padding=True)
        labels = batch.input_ids.masked_fill(batch.input_ids == 0, -100)
        optimizer.zero_grad()
        model(batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def run(workplace: Workplace, folder: str, name: str, rows: list[dict[str, Any]], *overrides: str) -> Path:
    """Run an example as its README says, from a folder that holds its modules; the run's folder."""
    for module in (EXAMPLES / folder).glob("*.py"):
        shutil.copy(module, workplace.folder)
    (workplace.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    root = workplace.folder / "runs"
    config = str(EXAMPLES / folder / f"{name}.yaml")
    workplace.call("train", config, f"storage.root={root}", f"run.name={name}", *SHORT, *overrides)
    return root / name


def batches(run: Path) -> list[list[dict[str, Any]]]:
    paths = sorted((run / "iterations").glob("*/batch.parquet"))
    assert len(paths) == 2
    found = [pq.read_table(path).to_pylist() for path in paths]
    texts = ("prompt", "label")
    return [[row | {name: json.loads(row[name]) for name in texts} for row in rows] for rows in found]


def said(row: dict[str, Any], role: str) -> list[str]:
    return [message["content"] for message in json.loads(row["dialogue"]) if message["role"] == role]


def assert_only_answers_are_trained(row: dict[str, Any]) -> None:
    """What is masked is what was observed, and the end of a turn that was cut off."""
    response = row["tokens"][-row["response_length"] :]
    masked = [token for token, trained in zip(response, row["loss_mask"], strict=True) if not trained]
    observed = "".join(f"<user>{text}<assistant>" for text in said(row, "user")[1:])
    seen = TOKENIZER.decode(TOKENIZER(observed).input_ids)
    assert TOKENIZER.decode(masked).replace("<eos>", "") == seen


@pytest.mark.slow
def test_a_program_that_fails_in_the_sandbox_is_repaired(workplace: Workplace) -> None:
    from examples.code_repair.code_repair import first_failure, outputs_of

    failures = ["NameError: name y is not defined", "SyntaxError: invalid syntax", "f(1)=4 not 2"]
    teach(workplace.folder / "coder", ["f(3)=6", *failures], ["x*2", "x+3", "y", "x+"])
    tasks = [{"prompt": "f(3)=6", "label": label} for label in ("x*2", "x+3")] * 8
    found = run(workplace, "code_repair", "code_repair", tasks, "model.path=coder")
    shown: set[str] = set()
    for row in (row for batch in batches(found) for row in batch):
        programs, failures = said(row, "assistant"), said(row, "user")[1:]
        expected, _ = outputs_of(row["label"])
        assert len(programs) == row["turns"] == len(failures) + 1
        for program, failure in zip(programs, failures, strict=False):
            outputs, error = outputs_of(program.strip())
            assert failure == (error or first_failure(outputs, expected))
        outputs, _ = outputs_of(programs[-1].strip())
        share = sum(a == b for a, b in zip(outputs, expected, strict=False)) / 4
        assert dict(row["reward_parts"]) == {"passed": share, "repairs": len(failures)}
        assert row["reward"] == pytest.approx(share * 0.8 ** len(failures))
        assert share == 1.0 or row["turns"] == 3
        assert_only_answers_are_trained(row)
        shown |= set(failures)
    assert "NameError: name 'y' is not defined" in shown
    assert {"f(1)=2 not 4", "f(1)=4 not 2"} <= shown
    assert any(failure.startswith("SyntaxError: ") for failure in shown)


@pytest.mark.slow
def test_solver_and_critic_are_rewarded_and_compared_apart(workplace: Workplace) -> None:
    sums = {"1+1=": "2", "1+2=": "3", "2+1=": "3"}
    asked = [*sums, *(f"{prompt}{answer}?" for prompt in sums for answer in "23")]
    teach(workplace.folder / "judge", asked, ["2", "3", "y", "n"])
    rows = [{"prompt": prompt, "label": label} for prompt, label in sums.items()] * 4
    seen: set[tuple[str, float]] = set()
    for batch in batches(run(workplace, "critic", "critic", rows, "model.path=judge")):
        assert len(batch) == 2 * 8 * 4
        rollouts = defaultdict(dict)
        for row in batch:
            rollouts[row["group_id"], row["index"]][row["role"]] = row
        for of in rollouts.values():
            solver, critic = of[None], of["critic"]
            answer, verdict = said(solver, "assistant")[0], said(critic, "assistant")[0]
            right = answer.strip() == solver["label"]
            assert said(critic, "user") == [f"{solver['prompt']}{answer.strip()}?"]
            assert solver["reward"] == float(right)
            assert critic["reward"] == float(verdict.strip() == ("y" if right else "n"))
            assert dict(solver["reward_parts"]) == {"critic": critic["reward"]}
            for row in of.values():
                assert_only_answers_are_trained(row)
                seen.add((row["role"] or "solver", row["reward"]))
        names = sorted({(row["group_id"], row["role"] or "") for row in batch})
        groups = torch.tensor([names.index((row["group_id"], row["role"] or "")) for row in batch])
        rewards = torch.tensor([row["reward"] for row in batch])
        advantages = torch.tensor([row["advantage"] for row in batch])
        torch.testing.assert_close(advantages, group_relative(rewards, groups))
    assert seen == {("solver", 0.0), ("solver", 1.0), ("critic", 0.0), ("critic", 1.0)}


@pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")
def test_an_environment_of_verifiers_makes_turns_and_rewards(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.connectors.environments.verifiers import write_prompts

    monkeypatch.syspath_prepend(str(EXAMPLES / "verifiers_env"))
    write_prompts(tmp_path / "tasks.jsonl", "verifiers-sums", 8)  # 0+0= to 0+7=
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    asked = [row["prompt"][-1]["content"] for row in rows]
    assert asked[3] == "0+3="
    teach(workplace.folder / "player", [*asked, "no."], list("0123"))
    seen = set()
    for batch in batches(run(workplace, "verifiers_env", "sums", rows[:4] * 4, "model.path=player")):
        assert len(batch) == 8 * 4
        for row in batch:
            answers, wanted = said(row, "assistant"), said(row, "user")[0][2:-1]
            assert said(row, "user")[1:] == ["no."] * (len(answers) - 1)
            right = answers[-1].strip() == wanted
            assert len(answers) == (1 if answers[0].strip() == wanted else 2)
            assert row["reward"] == (0.0 if not right else 1.0 if len(answers) == 1 else 0.5)
            assert dict(row["reward_parts"]) == {"right": row["reward"], "tries": len(answers)}
            assert_only_answers_are_trained(row)
            seen.add(row["reward"])
    assert seen == {0.0, 0.5, 1.0}


async def play(
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    function: dict[str, Any],
    texts: list[str],
    **task: Any,
) -> tuple[Mapping[int, BranchReward], list[list[dict[str, Any]]]]:
    """A rollout of an example in a process of rollouts, answered from a list: its end, and what was shown before each turn."""
    monkeypatch.syspath_prepend(str(EXAMPLES / folder))
    pool = SessionPool(SessionSection.model_validate({"function": function}))
    try:
        driver = Driver(texts)
        end = await pool.run(start(**task), driver.handle)
    finally:
        pool.close()
    assert end.status == "completed", end
    return end.rewards, driver.shown


async def test_each_failure_is_shown_and_each_repair_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    function = {"function": "code_repair:code_repair"}
    task = {"prompt": "f(3)=6", "label": "x*2"}
    rewards, shown = await play(monkeypatch, "code_repair", function, ["x+", "x+3", "x*2"], **task)
    assert rewards[0] == BranchReward(pytest.approx(0.64), {"passed": 1.0, "repairs": 2.0})
    assert [new[0]["content"] for new in shown[1:]] == ["SyntaxError: invalid syntax", "f(1)=2 not 4"]
    rewards, _ = await play(monkeypatch, "code_repair", function, ["x*2"], **task)
    assert rewards[0].value == 1.0
    outside = ["open('/etc/passwd').read()", "__import__('os').fork()", "2 if x == 1 else 0"]
    rewards, shown = await play(monkeypatch, "code_repair", function, outside, **task)
    assert rewards[0].value == pytest.approx(0.25 * 0.64)
    assert [new[0]["content"] for new in shown[1:]] == [
        "PermissionError: [Errno 13] Permission denied: '/etc/passwd'",
        "PermissionError: [Errno 1] Operation not permitted",
    ]


@pytest.mark.parametrize(
    ("answer", "verdict", "solver", "critic"),
    [("7", "y", 1, 1), ("7", "n", 1, 0), ("8", "y", 0, 0), ("8", "n", 0, 1)],
)
async def test_the_critic_is_paid_for_what_is_so(
    monkeypatch: pytest.MonkeyPatch, answer: str, verdict: str, solver: int, critic: int
) -> None:
    function = {"function": "critic:solve_and_judge"}
    rewards, shown = await play(monkeypatch, "critic", function, [answer, verdict], prompt="3+4=", label="7")
    assert rewards[0] == BranchReward(solver, {"critic": critic})
    assert rewards[1] == BranchReward(critic)


@pytest.mark.parametrize(("texts", "reward"), [(["3"], 1.0), (["4", "3"], 0.5), (["4", "5"], 0.0)])
async def test_verifiers_scores_the_sum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, texts: list[str], reward: float
) -> None:
    pytest.importorskip("verifiers.v1")
    from millrace.connectors.environments.verifiers import write_prompts

    monkeypatch.syspath_prepend(str(EXAMPLES / "verifiers_env"))
    write_prompts(tmp_path / "tasks.jsonl", "verifiers-sums", 4)
    row = json.loads((tmp_path / "tasks.jsonl").read_text().splitlines()[3])
    assert row["prompt"] == [{"role": "user", "content": "0+3="}]
    options = {"taskset": "verifiers-sums"}
    function = {"function": "millrace.connectors.environments.verifiers:run", "options": options}
    rewards, shown = await play(monkeypatch, "verifiers_env", function, texts, **row)
    assert rewards[0] == BranchReward(reward, {"right": reward, "tries": float(len(texts))})
    assert [new[0]["content"] for new in shown[1:]] == ["no."] * (len(texts) - 1)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_page_of_an_example_shows_its_module_and_its_configuration(folder: str) -> None:
    page = EXAMPLES / folder / "README.md"
    (config,) = (EXAMPLES / folder).glob("*.yaml")
    shown = blocks(page, "python")
    assert len(shown) == 1
    assert shown[0] in [module.read_text() for module in (EXAMPLES / folder).glob("*.py")]
    assert blocks(page, "yaml") == [config.read_text()]


def test_what_the_repair_examples_warm_up_teaches_is_right() -> None:
    from examples.code_repair import warm_up
    from examples.code_repair.code_repair import first_failure, outputs_of

    rng, checked = random.Random(3), 0
    for _ in range(30):
        program, x = rng.choice(warm_up.all_tasks())
        row = warm_up.lesson(program, x, rng)
        assert row["label"] == program
        assert eval(program, {"x": x}) == warm_up.value(program, x)  # noqa: S307 - a program of the example
        assert row["prompt"][0]["content"] == warm_up.shown(program, x)
        for wrong, failure in zip(row["prompt"][1::2], row["prompt"][2::2], strict=True):
            if checked < 3:
                expected, _ = outputs_of(program)
                outputs, _ = outputs_of(wrong["content"])
                assert failure["content"] == first_failure(outputs, expected)
            checked += 1
    assert checked >= 3


def test_what_the_critic_examples_warm_up_teaches_is_right() -> None:
    from examples.critic import warm_up

    rng, verdicts = random.Random(3), set()
    for _ in range(100):
        row = warm_up.lesson({"prompt": "3+4=", "label": "7"}, rng)
        found = re.fullmatch(r"3\+4=(-?\d+)?\??", row["prompt"])
        assert found
        if found[1] is None:
            assert row["label"] == "7"
        else:
            assert row["label"] == ("y" if found[1] == "7" else "n")
            verdicts.add(row["label"])
    assert verdicts == {"y", "n"}
