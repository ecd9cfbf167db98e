"""What `millrace check` answers, on good and on wrong configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from millrace.core.config.reading.load import load_config
from millrace.flows.commands import app
from millrace.flows.preflight.check import check
from tests.support.wrong_configs import TEXTS, VOTED, WRONG

HEAVY = ("torch", "prefect", "ray", "mlflow", "megatron", "transformers")


@pytest.fixture
def place(wrong_place: Path) -> Path:
    return wrong_place


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    for name in ("ID", "SECRET"):
        monkeypatch.setenv(f"AWS_{'ACCESS_KEY_' + name if name == 'ID' else 'SECRET_ACCESS_KEY'}", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "80")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def test_a_good_configuration_gets_its_plan() -> None:
    result = run("run.yaml")
    assert result.exit_code == 0, result.output
    for part in ("8 prompts", "32 samples", "2 steps of 16", "weight versions 1 .. 8", "dp 1", "float32"):
        assert part in " ".join(result.output.split())


def test_layouts_are_proposed_for_a_number_of_gpus_also_beside_a_layout_that_is_wrong() -> None:
    good = run("run.yaml", "--gpus", "2", "--gpu-memory", "24")
    assert good.exit_code == 0, good.output
    assert "layouts of the trainer on 2 GPUs of 24 GiB" in good.output
    wrong = run("run.yaml", "trainer.world_size=3", "trainer.parallel.tensor=3", "--gpus", "2")
    assert wrong.exit_code == 2
    assert "not tensor 3:" not in wrong.output
    assert "layouts of the trainer on 2 GPUs of 79.6 GiB" in wrong.output
    assert "layouts of the trainer" not in run("run.yaml").output


@pytest.mark.parametrize(
    "reward",
    [
        "reward.function=millrace.core.rewards.text:exact_match",
        "reward.function=play:voted",
        "reward={function: play:score, named: [{name: other, function: play:voted}]}",
        "evaluation.sets.0.reward.function=play:voted",
    ],
)
def test_a_majority_of_answers_may_choose_the_best(place: Path, reward: str) -> None:
    rows = (place / "train.jsonl").read_text().splitlines()
    other = {**json.loads(rows[0]), "metadata": {"reward": "other"}}
    (place / "held_out.jsonl").write_text("\n".join([rows[0], json.dumps(other), ""]))
    own = "evaluation.sets.0.path=held_out.jsonl"
    result = run("run.yaml", *VOTED, reward, own, "data.sources.0.metadata_key=metadata")
    assert "checkpoint.keep_best" not in result.output, result.output


def test_the_plan_says_how_a_rollout_of_several_turns_goes_on() -> None:
    session = "{function: play:play, tools: [play:look], max_turns: 3, max_tokens: 64}"
    result = run("run.yaml", f"rollout.session={session}")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert (
        "by play:play, with the tools look; at most 3 turns and 64 tokens; in 1 process, up to 512 at once"
        in said
    )
    assert "response 64 tokens at most" in said


@pytest.mark.parametrize(
    ("overrides", "field"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_a_wrong_configuration_gets_one_screen_that_names_the_field(overrides: list[str], field: str) -> None:
    result = run("run.yaml", *overrides)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.output.splitlines()
    assert len(lines) <= 24
    named = [line for line in lines if line.startswith("  ") and not line.startswith("    ")]
    assert any(field in line for line in named), result.output
    assert "; " in " ".join(line.strip() for line in lines), f"no remedy in {result.output}"


@pytest.mark.parametrize(("text", "part"), [case[1:] for case in TEXTS], ids=[case[0] for case in TEXTS])
def test_bad_yaml_gets_its_place(place: Path, text: str, part: str) -> None:
    (place / "bad.yaml").write_text(text)
    result = run("bad.yaml")
    assert result.exit_code == 2
    assert part in result.output
    assert "Traceback" not in result.output


def test_a_router_that_is_not_installed_or_has_no_such_option_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = "engines.router.options.cache_threshold=0.5"
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    result = run("run.yaml", router)
    assert result.exit_code == 2
    assert "pip install 'millrace[router]'" in " ".join(result.output.split())
    monkeypatch.delitem(sys.modules, "sglang_router")
    pytest.importorskip("sglang_router")
    assert run("run.yaml", router).exit_code == 0
    result = run("run.yaml", router.replace("thresh", "tresh"))
    assert "did you mean cache_threshold?" in " ".join(result.output.split())


def test_a_missing_file_is_named() -> None:
    result = run("nowhere.yaml")
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.output


def test_problems_of_all_kinds_come_at_once() -> None:
    wrong = [
        "model.path=no-model",
        "storage.root=/proc/x",
        "trainer.global_batch=12",
        "reward.function=no.module:f",
    ]
    wrong += ["data.sources.sums.path=no.jsonl"]
    output = run("run.yaml", *wrong).output
    assert output.splitlines()[0].endswith("5 problems in the configuration:")
    for override in wrong:
        assert override.partition("=")[0] in output


def test_rows_are_not_asked_for_without_their_secrets() -> None:
    """The function was called before its blocks were read, and failed."""
    rows = "{function: 'hooks_of_a_user:no_rows', options: {key: '${env:NO_SUCH_SECRET}'}}"
    output = run("run.yaml", f"data.sources=[{{name: own, rows: {rows}}}]").output
    assert output.splitlines()[0].endswith("1 problem in the configuration:"), output
    assert "NO_SUCH_SECRET is not set" in " ".join(output.split())


def test_a_screen_holds_what_any_number_of_problems_needs() -> None:
    many = [case[1][0] for case in WRONG if "=" in case[1][0]][:60]
    assert len(run("run.yaml", *many).output.splitlines()) <= 24


def test_what_prepare_will_make_may_be_missing_until_it_ran() -> None:
    changes = [
        "run.prepare=millrace.flows.quickstart:prepare",
        "model.path=later",
        "data.sources.sums.path=later.jsonl",
    ]
    config = load_config("run.yaml", changes)
    assert check(config) == []
    fields = {problem.field for problem in check(config, prepared=True)}
    assert fields == {"model.path", "data.sources.sums.path"}
    said = run("run.yaml", *changes)
    assert said.exit_code == 0
    maker = "the start fails unless run.prepare (millrace.flows.quickstart:prepare) makes it"
    (line,) = [line for line in said.output.splitlines() if maker in line]
    assert line.split() == ["data.sources.sums.path", *f"later.jsonl is not there: {maker}".split()]


def test_a_teacher_that_prepare_will_make_may_be_missing_until_it_ran() -> None:
    changes = ["run.prepare=millrace.flows.quickstart:prepare_with_teacher", "algorithm.preset=opd"]
    config = load_config("run.yaml", [*changes, "algorithm.teacher=later"])
    assert check(config) == []
    assert [problem.field for problem in check(config, prepared=True)] == ["algorithm.teacher"]


def test_checking_calls_nothing_of_the_users_but_the_reward_and_that_in_another_process(place: Path) -> None:
    (place / "calling_hooks.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def prepare(config):\n    raise AssertionError\n"
        "def keep(samples):\n    raise AssertionError\n"
        "def score(sample):\n"
        "    with Path('scored').open('a') as file:\n        file.write(f'{os.getpid()} {sample.response}\\n')\n    return 0.0\n"
    )
    changes = ["run.prepare=calling_hooks:prepare", "reward.function=calling_hooks:score"]
    assert check(load_config("run.yaml", [*changes, "filter.group_filter=calling_hooks:keep"])) == []
    pids, responses = zip(
        *(line.split(" ") for line in (place / "scored").read_text().splitlines()), strict=True
    )
    assert responses == ("0", "")
    assert len(set(pids)) == 1
    assert str(os.getpid()) not in pids


def test_rows_without_labels_pass_where_a_rollouts_code_may_score_it(place: Path) -> None:
    (place / "bare.jsonl").write_text('{"prompt": "1+2="}\n' * 4)
    bare = ["data.sources.0.path=bare.jsonl", "evaluation.sets=[]"]
    assert [problem.field for problem in check(load_config("run.yaml", bare))] == [
        "data.sources.sums.label_key"
    ]
    (place / "scores_itself.py").write_text("async def play(session):\n    return 1.0\n")
    session = "rollout.session={function: 'scores_itself:play', max_tokens: 64}"
    assert check(load_config("run.yaml", [*bare, session])) == []


def test_chat_messages_and_parquet_pass(place: Path) -> None:
    (place / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}\n')
    paths = ["data.sources.0.path=chat.jsonl", "evaluation.sets.held_out.path=train.parquet"]
    assert check(load_config("run.yaml", paths)) == []


def test_no_heavy_library_is_imported(place: Path) -> None:
    code = (
        "import sys\nfrom millrace.flows.commands import app\n"
        "try:\n    app(['check', 'run.yaml'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_more_gpus_than_this_host_has(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["trainer.world_size=2", "engines.gpus=2", "engines.count=2"]
    assert check(load_config("run.yaml", overrides)) == []  # on CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    (problem,) = check(load_config("run.yaml", overrides))
    assert problem.field == "trainer.world_size"
    assert "need 6 GPUs, and this host shows 4" in str(problem)
    assert check(load_config("run.yaml", [*overrides, "placement.colocate=true", "engines.count=1"])) == []


def test_without_a_gpu_no_engine_only_prefills(place: Path) -> None:
    parts = ["engines.count=2", "engines.prefill=1"]
    (problem,) = check(load_config("run.yaml", parts))
    assert problem.field == "engines.prefill"
    elsewhere = ["engines.kind=external", "engines.addresses=['http://127.0.0.1:1','http://127.0.0.1:2']"]
    fields = {problem.field for problem in check(load_config("run.yaml", [*elsewhere, parts[1]]))}
    assert fields == {
        "engines.addresses"
    }  # nobody answers there: whether this host has a GPU says nothing of them


def test_what_moves_kv_caches_is_looked_for(place: Path, sglang: Path) -> None:
    config = load_config("run.yaml", ["engines.kind=sglang", "engines.count=2", "engines.prefill=1"])
    (problem,) = check(config)
    assert problem.field == "engines.sglang.disaggregation_transfer_backend"
    assert "install mooncake-transfer-engine" in str(problem)
    (sglang / "mooncake").mkdir()
    assert check(config) == []


def test_what_a_draft_model_takes_is_looked_for(place: Path, sglang: Path) -> None:
    options = ["engines.kind=sglang", "engines.sglang.speculative_algorithm="]
    assert check(load_config("run.yaml", [options[0], options[1] + "NGRAM"])) == []
    config = load_config("run.yaml", [options[0], options[1] + "STANDALONE"])
    (problem,) = check(config)
    assert "install sgl-deep-gemm" in str(problem)
    (sglang / "deep_gemm").mkdir()
    assert check(config) == []


@pytest.mark.parametrize(
    ("version", "on_update", "named"),
    [
        ("0.5.17", "resend", []),
        ("0.5.17", "keep", ["pipeline.on_update"]),
        ("0.5.22.post1", "retract", ["pipeline.on_update"]),
        ("0.5.23", "retract", []),
        ("0.6", "keep", []),
    ],
)
def test_an_sglang_that_cannot_keep_requests_amid_an_update_is_told(
    place: Path, sglang: Path, version: str, on_update: str, named: list[str]
) -> None:
    (sglang / "sglang" / "srt").mkdir(parents=True, exist_ok=True)
    (sglang / "sglang" / "srt" / "server_args.py").touch()
    (sglang / "sglang-any.dist-info").mkdir()
    (sglang / "sglang-any.dist-info" / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
    ahead = ["pipeline.ahead=1", "algorithm.correction.kind=truncate", "engines.kind=sglang"]
    config = load_config("run.yaml", [*ahead, f"pipeline.on_update={on_update}"])
    assert [problem.field for problem in check(config)] == named


def test_an_option_that_sglang_in_its_own_folder_does_not_have(place: Path, sglang: Path) -> None:
    """Only an SGLang beside millrace was looked at: with the documented install nothing was checked."""
    (sglang / "sglang" / "srt").mkdir()
    (sglang / "sglang" / "srt" / "server_args.py").write_text(
        "import cuda_only\nclass ServerArgs:\n    disable_radix_cache: A[bool, 'help'] = False\n"
    )
    (sglang / "sglang-0.5.17.dist-info").mkdir()
    (sglang / "sglang-0.5.17.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.17\n")
    kind, option = "engines.kind=sglang", "engines.sglang.disable_radix_cache=true"
    assert check(load_config("run.yaml", [kind, option])) == []
    (problem,) = check(load_config("run.yaml", [kind, option.replace("cache", "cach")]))
    assert problem.field == "engines.sglang.disable_radix_cach"
    for part in ("SGLang 0.5.17", "did you mean disable_radix_cache?"):
        assert part in str(problem)


def test_options_that_cannot_be_checked_here_are_named(sglang: Path) -> None:
    option = "engines.sglang.schedule_policy=lpm"
    result = run("run.yaml", option)
    assert result.exit_code == 0, result.output
    assert "Not checked: engines.sglang.schedule_policy. No SGLang is found" in result.output
    source = sglang / "sglang" / "srt" / "server_args.py"
    source.parent.mkdir()
    source.write_text("class ServerArgs:\n    schedule_policy: str = 'fcfs'\n")
    assert "Not checked" not in run("run.yaml", option).output
