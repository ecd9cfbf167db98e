"""What `millrace check` answers, on good and on wrong configurations."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner, Result

from benchmarks.gpu.shapes import model_config
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.core.architecture import architecture
from millrace.core.config.plan import trainer_memory
from millrace.core.config.reading.load import load_config
from millrace.core.model_folder.config_file import read_hf_config
from millrace.flows.cli import app
from millrace.flows.preflight.check import check
from millrace.flows.preflight.check_machine import check_disk
from tests.support.wrong_configs import TEXTS, WRONG

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


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in which SGLang is found, on a host with three GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(tmp_path / "packages"))
    (tmp_path / "packages" / "sglang").mkdir(parents=True)
    return tmp_path / "packages"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments])


def test_a_good_configuration_gets_its_plan() -> None:
    result = run("run.yaml")
    assert result.exit_code == 0, result.output
    for part in ("8 prompts", "32 samples", "2 steps of 16", "weight versions 1 .. 8", "dp 1", "float32"):
        assert part in " ".join(result.output.split())


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
    assert run("run.yaml", *changes).exit_code == 0


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
        "import sys\nfrom millrace.flows.cli import app\n"
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


def has_memory(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """Let this host have so much memory."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=gib * 2**30))


def has_disk(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    """Let every disk have so much room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=gib * 2**30))


def test_a_host_without_memory_for_what_its_ranks_put_there(
    tmp_path: Path, sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.0 billion parameters: 12 bytes of each put aside, and 14 in a checkpoint."""
    hollow_model(tmp_path / "model", "4b")
    on_gpus = [f"model.path={tmp_path / 'model'}", "engines.kind=sglang", "placement.colocate=true"]
    on_gpus += ["model.dtype=bfloat16", "checkpoint.every=2"]

    def problems(*overrides: str) -> list[str]:
        return [str(problem) for problem in check(load_config("run.yaml", [*on_gpus, *overrides]))]

    has_disk(monkeypatch, 200)
    has_memory(monkeypatch, 100)
    assert problems() == []
    has_memory(monkeypatch, 90)
    (problem,) = problems()
    assert "keep 97 GiB in this host's memory, which is 90 GiB: optimizer while engines" in problem
    assert "checkpoint.background" in problem
    assert problems("checkpoint.every=100") == []  # at the end alone, when nothing goes on beside it
    assert problems("checkpoint.background=false") == []
    has_memory(monkeypatch, 40)
    (problem,) = problems("checkpoint.background=false")
    assert "placement.offload_trainer" in problem
    assert problems("checkpoint.background=false", "placement.offload_trainer=false") == []


def test_a_disk_without_room_for_what_the_run_saves(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4.0 billion parameters: 14 bytes of each in a checkpoint, of which two are whole while a third is written."""
    hollow_model(place / "large", "4b")
    wanted = [f"model.path={place / 'large'}", "model.dtype=bfloat16", f"storage.root={place / 'runs'}"]
    wanted += ["run.name=saved", "run.iterations=10", "checkpoint.every=2", "checkpoint.export_last=false"]

    def problems(free_gib: int, *overrides: str) -> list[str]:
        has_disk(monkeypatch, free_gib)
        return [str(problem) for problem in check(load_config("run.yaml", [*wanted, *overrides]))]

    assert problems(160) == []
    (problem,) = problems(150)
    assert "checkpoint.keep_last = 2" in problem
    assert (
        f"keeps 157 GiB of weights (3 checkpoints at most at once 157 GiB), and the disk of {place}"
        in problem
    )
    assert "150 GiB for them" in problem
    assert problems(150, "checkpoint.keep_last=1") == []
    assert problems(55, "checkpoint.every=100") == []
    assert problems(50, "checkpoint.every=100") != []
    (problem,) = problems(55, "checkpoint.every=100", "checkpoint.export_last=true")
    assert "1 checkpoint 52.4 GiB, 1 export 7.49 GiB" in problem
    shape = architecture(read_hf_config(str(place / "large"), "model.path"))
    assert [*check_disk(load_config("run.yaml", [*wanted, "storage.root=s3://bucket/runs"]), shape)] == []
    saved = place / "runs" / "saved" / "checkpoints" / "000002" / "rank.distcp"
    saved.parent.mkdir(parents=True)
    with saved.open("wb") as file:
        file.truncate(52 * 2**30)  # it is there already, or makes room
    (saved.parent / "removed").symlink_to("meanwhile")  # listed, and not there to be looked at
    assert problems(110) == []
    assert problems(100) != []


def test_a_full_disk_is_no_matter_to_a_complete_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_disk(monkeypatch, 0)
    (problem,) = check(load_config("run.yaml", ["run.name=trained"]))  # three of four iterations
    assert problem.field == "checkpoint.keep_last"
    assert check(load_config("run.yaml", ["run.name=trained", "run.iterations=3"])) == []


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


def test_the_recipes_that_ship_pass() -> None:
    recipes = Path(__file__).parents[2] / "deployments" / "recipes"
    for recipe in sorted(set(recipes.glob("*.yaml")) - set(recipes.glob("qwen3*.yaml"))):
        config = load_config(str(recipe), ["run.prepare=millrace.flows.quickstart:prepare"])
        found = {problem.field for problem in check(config)}
        needs = {"trainer.device", "engines.kind"} if config.trainer.device == "cuda" else set()
        assert found <= needs, recipe.name  # of a GPU host, where this is none


def hollow_model(folder: Path, shape: str) -> None:
    """A checkpoint of a real size whose weights are a hole on the disk."""
    from torch import device
    from transformers import Qwen3ForCausalLM

    config = model_config(shape)
    with device("meta"):
        tensors = Qwen3ForCausalLM(config).state_dict()
    del tensors["lm_head.weight"]  # tied
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize(
    ("recipe", "shape", "gpus"), [("qwen3_0.6b_one_gpu", "0.6b", 1), ("qwen3_4b_eight_gpus", "4b", 8)]
)
def test_the_recipes_for_real_models_pass_with_models_of_their_size(
    recipe: str, shape: str, gpus: int, tmp_path: Path, sglang: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hollow_model(tmp_path / "model", shape)
    rows = [{"prompt": f"{n} + 1 =", "label": str(n + 1)} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    has_memory(monkeypatch, 512)
    has_disk(monkeypatch, 300)
    paths = [f"model.path={tmp_path / 'model'}", f"storage.root={tmp_path / 'runs'}"]
    paths += [f"{which}.path={tmp_path / 'rows.jsonl'}" for which in ("data.sources.0", "evaluation.sets.0")]
    file = Path(__file__).parents[2] / "deployments" / "recipes" / f"{recipe}.yaml"
    config = load_config(str(file), paths)
    assert check(config) == []
    parts = trainer_memory(config, architecture(read_hf_config(str(tmp_path / "model"))))
    assert sum(part.size for part in parts) < 60 * 2**30
