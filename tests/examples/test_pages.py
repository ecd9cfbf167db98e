"""The pages about your functions show code that runs, and the files as they are."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace import BufferedGroup, GroupSample, TokenBatch
from millrace.connectors.huggingface.pretrained import PACKAGE, WHEEL
from millrace.core.config.reading.load import load_config
from millrace.flows.pretrained import sums

ROOT = Path(__file__).parents[2]
MAKE_MODELS = [  # whoever has a model needs none of them
    "examples/code_repair/warm_up.py",
    "examples/code_reward/warm_up.py",
    "examples/critic/warm_up.py",
    "examples/distillation_served/make_teacher.py",
    "examples/geometry/geometry.py",
    "examples/judge/make_judge.py",
    "examples/puzzles/puzzles.py",
    "examples/sft_dialogues/price_list.py",
    "examples/verifiers_env/prompts.py",
    "examples/warm_ups/sums_warm_up.py",
    "examples/warm_ups/tool_warm_up.py",
]
FOLDERS = [
    "reward",
    "group_filter",
    "advantage",
    "loss",
    "generation",
    "openai_client",
    "calculator",
    "search",
    "tournament",
    "group_reward",
    "judge",
    "code_reward",
    "mcp_tool",
    "distillation_served",
    "reuse",
    "levels",
    "puzzles",
]

ELSEWHERE = {  # folders whose pages another test holds
    "code_repair": "test_agent_examples.py",
    "critic": "test_agent_examples.py",
    "geometry": "test_geometry.py",
    "pretrained": "test_pages.py",
    "sft_dialogues": "test_sft_dialogues.py",
    "verifiers_env": "test_agent_examples.py",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("folder", FOLDERS)
def test_an_examples_page_shows_its_module_and_its_configuration(folder: str) -> None:
    page = ROOT / "examples" / folder / "README.md"
    (module,) = (ROOT / "examples" / folder).glob("*.py")
    (config,) = (ROOT / "examples" / folder).glob("*.yaml")
    assert blocks(page, "python") == [module.read_text()]
    assert blocks(page, "yaml") == [config.read_text()]


def test_the_page_of_the_pretrained_model_shows_its_configurations_a_sum_and_a_problem_as_they_are() -> None:
    page = ROOT / "examples" / "pretrained" / "README.md"
    assert blocks(page, "yaml") == [(page.parent / name).read_text() for name in ("sums.yaml", "words.yaml")]
    shown, problem = blocks(page, "text")
    assert {"prompt": shown.rstrip("\n"), "label": "26"} in sums(random.Random(0))
    text, _, label = problem.strip().rpartition(" ")
    one, other = re.findall(r"\d+", text)
    assert int(label) == int(one) * (int(other) + 1)
    assert WHEEL in page.read_text()
    assert PACKAGE in page.read_text()


def test_the_list_of_examples_names_each_folder_once() -> None:
    listed = re.findall(
        r"^\| \[(\w+)\]\((\w+)/README.md\)", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(name for name, _ in listed) == sorted([*FOLDERS, *ELSEWHERE])
    assert all(name == folder for name, folder in listed)


def test_every_folder_of_examples_is_held() -> None:
    folders = [path.name for path in (ROOT / "examples").iterdir() if (path / "README.md").exists()]
    assert sorted(folders) == sorted([*FOLDERS, *ELSEWHERE])
    for folder, test in ELSEWHERE.items():
        assert f'"{folder}"' in (Path(__file__).parent / test).read_text()


SEVERAL_TURNS = sorted(
    path.parent.name for path in (ROOT / "examples").glob("*/*.yaml") if "  session:" in path.read_text()
)
RISE = re.compile(
    r"(0\.\d\d) to (0\.\d\d) \((?:`run\.seed=)?(\d)`?\)"
)  # held-out reward before and after, and the seed


@pytest.mark.parametrize("folder", SEVERAL_TURNS)
def test_the_page_of_rollouts_of_several_turns_has_command_rise_time_and_a_transcript(folder: str) -> None:
    page = ROOT / "examples" / folder / "README.md"
    (config,) = (ROOT / "examples" / folder).glob("*.yaml")
    assert f"millrace train {config.name}\n" in blocks(page, "sh")[0]
    said = re.search(
        r"[Ii]n (\d+) iterations the (?:solver's )?held-out reward rises from .*", page.read_text()
    )
    assert said, "what to expect"
    assert int(said[1]) == load_config(str(config)).run.iterations
    rises = RISE.findall(said[0])
    assert [int(seed) for _, _, seed in rises] == [1, 2, 3]
    assert all(float(after) >= float(before) + 0.05 for before, after, _ in rises)
    assert re.search(r"\bminutes\b", said[0]), "how long it takes"
    fenced = [part.partition("\n") for part in page.read_text().split("```")[1::2]]
    shown = [text for language, _, text in fenced if language in ("", "text")]
    transcripts = [text for text in shown if "user  " in text and "assistant  " in text]
    assert transcripts, "what a rollout looks like"


def functions() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "algorithms.md", "python"):
        exec(block.replace("from __future__ import annotations\n", ""), names)
    return names


def test_the_functions_of_the_page_on_algorithms_run() -> None:
    names = functions()
    held = [
        BufferedGroup(0, at, "sums", 1, 1, reward, 0.5) for at, reward in enumerate([0.1, 0.5, None, 0.75])
    ]
    assert names["undecided"](held, high=0.7) == held[1:2]
    group = [GroupSample("a", 1.0), GroupSample("b", 0.75), GroupSample("c", None, "failed")]
    assert names["spread"](group) == "rewards are only 0.25 apart"
    assert names["spread"](group, least=0.2) is None
    rewards = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    truncated = torch.tensor([True, False, False])
    shaped = names["half_if_truncated"](rewards, torch.tensor([4, 4, 4]), truncated)
    assert shaped.tolist() == [0.5, 2.0, 3.0]
    assert names["best_of_group"](rewards, torch.tensor([0, 0, 1]), push=0.5).tolist() == [0.0, 0.5, 0.5]
    batch = TokenBatch(
        logprobs=torch.tensor([0.0, -1.0], requires_grad=True),
        old_logprobs=torch.tensor([-1.0, -1.0]),
        rollout_logprobs=torch.tensor([-1.0, -1.0]),
        ref_logprobs=None,
        advantages=torch.tensor([1.0, 1.0]),
        mask=torch.tensor([True, True]),
        lengths=torch.tensor([2]),
        weights=torch.tensor([0.5, 0.5]),
    )
    loss, metrics = names["bounded"](batch, bound=2.0)
    assert loss.tolist() == [0.0, 1.0]
    assert [float(x) for x in metrics["bounded_share"]] == [1.0, 2.0]


def test_no_example_or_page_for_users_imports_deeper_than_millrace() -> None:
    pages = [
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
    ]
    deeper = re.compile(r"^\s*(from|import) millrace\.", re.MULTILINE)
    shown = [(ROOT / module).read_text() for module in MAKE_MODELS]
    found = []
    for page in pages:
        text = page.read_text()
        if page.suffix == ".md":  # may show a module that makes a model
            for module in shown:
                text = text.replace(module, "")
        if deeper.search(text):
            found.append(str(page.relative_to(ROOT)))
    assert sorted(found) == MAKE_MODELS


@pytest.mark.parametrize("config", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_an_examples_files_are_there_or_made_beside_its_model(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its page starts it: from its folder. What `run.prepare` makes lies where the model does."""
    monkeypatch.chdir(config.parent)
    loaded = load_config(config.name)
    named = [loaded.model.path, *(source.path for source in loaded.data.sources if source.path)]
    named += [held_out.path for held_out in loaded.evaluation.sets]
    made = Path(loaded.model.path).parent.resolve()
    elsewhere = [path for path in named if Path(path).resolve().parent != made and not Path(path).exists()]
    assert elsewhere == []
