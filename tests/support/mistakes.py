"""Mistakes that newcomers make, each with what the answer must name: the field or file, the reason, the remedy.

What they are wrong beside lies in `write_good` of wrong_configs and in `write_mistakes` here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.wrong_configs import write_good


class Mistake(NamedTuple):
    """Overrides of the good configuration, and what the answer says."""

    name: str
    overrides: list[str]
    field: str
    reason: str
    remedy: str


NUMBER = "return a number, a RewardResult, or a mapping"
PPO = "algorithm.preset=ppo"

MISTAKES = [
    Mistake("a section misspelt", ["trainer.optimiser.lr=1e-5"], "trainer.optimiser", "unknown key", "did you mean optimizer?"),
    Mistake("a field misspelt", ["algorithm.loss.clip_higher=0.3"], "algorithm.loss.clip_higher", "unknown key", "did you mean clip_high?"),
    Mistake("a critic's field without a critic", ["algorithm.advantage.critic.lr=1e-5"], "algorithm.advantage.critic", "group_relative has no such field", "set algorithm.advantage.kind=gae"),
    Mistake("a critic in the place of other trainers", ["algorithm.critic.lr=1e-5"], "algorithm.critic", "unknown key", "algorithm.advantage.critic?"),
    Mistake("an unknown preset", ["algorithm.preset=ppoo"], "algorithm.preset", "not a choice", "did you mean ppo?"),
    Mistake("text for a number", ["rollout.prompts=many"], "rollout.prompts", "not a whole number", "give a whole number"),
    Mistake("half a prompt", ["rollout.prompts=8.5"], "rollout.prompts", "not a whole number", "give a whole number"),
    Mistake("text for a rate", ["trainer.optimizer.lr=small"], "trainer.optimizer.lr", "not a number", "give a number"),
    Mistake("text for a switch", ["data.shuffle=maybe"], "data.shuffle", "neither true nor false", "give true or false"),
    Mistake("a type of transformers", ["model.dtype=fp16"], "model.dtype", "not a choice", "bfloat16"),
    Mistake("no iterations", ["run.iterations=0"], "run.iterations", "greater than", "use 1 or more"),
    Mistake("a path for a name", ["run.name=runs/a"], "run.name", "form", "use lower-case letters"),
    Mistake("spaces around =", ["run.seed", "=", "3"], "override", "no key=value form", "run.name=a"),
    Mistake("a reward with a dot", ["reward.function=rewards_of_a_newcomer.good"], "reward.function", "form", "package.module:function"),
    Mistake("a reward that is not there", ["reward.function=no_rewards:good"], "reward.function", "No module named", "correct the path"),
    Mistake("a reward of another name", ["reward.function=rewards_of_a_newcomer:goood"], "reward.function", "has no function goood", "after the colon"),
    Mistake("a reward of slime's arguments", ["reward.function=rewards_of_a_newcomer:two"], "reward.function", "cannot be called with (sample)", "its signature is two(args, sample)"),
    Mistake("an option that the reward does not take", ["reward.function=rewards_of_a_newcomer:good", "reward.options.scale=2"], "reward.options", "does not take", "its parameters are"),
    Mistake("a reward that raises", ["reward.function=rewards_of_a_newcomer:raises"], "reward.function", "it raised KeyError: 'answer' in rewards_of_a_newcomer.py, line 8, for row 0 of sums", "correct the function"),
    Mistake("a reward that raises on an empty response", ["reward.function=rewards_of_a_newcomer:first_letter"], "reward.function", "IndexError: string index out of range in rewards_of_a_newcomer.py, line 13, for row 0 of sums with an empty text", "correct the function"),
    Mistake("a reward that returns nothing", ["reward.function=rewards_of_a_newcomer:nothing"], "reward.function", "returned reward of type NoneType", NUMBER),
    Mistake("a reward that returns two numbers", ["reward.function=rewards_of_a_newcomer:pair"], "reward.function", "returned reward of type tuple", NUMBER),
    Mistake("a reward that is no number", ["reward.function=rewards_of_a_newcomer:nan"], "reward.function", "returned reward = nan", NUMBER),
    Mistake("a reward that ends its process", ["reward.function=rewards_of_a_newcomer:ends"], "reward.function", "ended itself with exit code 3", "correct the function"),
    Mistake("a reward that hangs", ["reward.function=rewards_of_a_newcomer:hangs", "reward.timeout_s=0.5"], "reward.function", "no answer within 0.5 s", "reward.timeout_s"),
    Mistake("a model that is a file", ["model.path=model/model.safetensors"], "model.path", "no such folder", "a file is there: name a folder"),
    Mistake("a model cut short", ["model.path=cut"], "model.path", "no whole safetensors file", "take a whole checkpoint"),
    Mistake("a model without its weights", ["model.path=weightless"], "model.path", "its weights lack model.safetensors", "copy the whole checkpoint"),
    Mistake("gpt2", ["model.path=gpt2"], "model.path", "'gpt2' is not supported", "supported"),
    Mistake("a tokenizer without an end", ["model.tokenizer=endless"], "model.tokenizer", "no eos_token", "add eos_token"),
    Mistake("a template without a generation prompt", ["model.chat_template=silent.jinja"], "model.chat_template", "no generation prompt", "{% if add_generation_prompt %}<assistant>{% endif %}"),
    Mistake("a template that fails on one row", ["model.chat_template=short.jinja", "data.sources.sums.path=chats.jsonl"], "model.chat_template", "first on row 3", "correct the template"),
    Mistake("data as CSV", ["data.sources.sums.path=train.csv"], "data.sources.sums.path", "files of this format are not read", ".jsonl"),
    Mistake("a JSON array", ["data.sources.sums.path=array.json"], "data.sources.sums.path", "can be used", "jq -c '.[]'"),
    Mistake("a JSON array over many lines", ["data.sources.sums.path=indented.json"], "data.sources.sums.path", "can be used", "jq -c '.[]'"),
    Mistake("a folder without data", ["data.sources.sums.path=empty"], "data.sources.sums.path", "holds no file", "name the folder with the files"),
    Mistake("data that is not there", ["data.sources.sums.path=nowhere.jsonl"], "data.sources.sums.path", "no such file", "correct the source's path"),
    Mistake("an evaluation set that is not there", ["evaluation.sets.held_out.path=nowhere.jsonl"], "evaluation.sets.held_out.path", "no such file", "correct"),
    Mistake("another prompt key", ["data.sources.sums.prompt_key=question"], "data.sources.sums.prompt_key", '"prompt": "0+0="', "set it to the key"),
    Mistake("labels that are not there", ["data.sources.sums.label_key=answer"], "data.sources.sums.label_key", "has it", "set it to the key"),
    Mistake("rows that are mostly wrong", ["data.sources.sums.path=mostly.jsonl"], "data.sources.sums.path", "6 of its 10 rows cannot be used", "data.max_quarantined_share"),
    Mistake("prompts that are mostly too long", ["data.sources.sums.path=lengthy.jsonl", "data.max_prompt_tokens=12"], "data.sources.sums.path", "too long: ", "data.max_quarantined_share"),
    Mistake("prompts that are all too long", ["data.max_prompt_tokens=2"], "data.max_prompt_tokens", "is longer, the shortest 6", "set it to 6 or more"),
    Mistake("two sources of one name", ["data.sources=[{name: x, path: train.jsonl}, {name: x, path: train.jsonl}]"], "data.sources.1.name", "item 0 has the same name", "its own name"),
    Mistake("SFT on numbers", ["algorithm.loss=sft", "rollout.samples_per_prompt=1", "trainer.global_batch=8", "data.sources.sums.path=numbers.parquet"], "data.sources.sums.label_key", "row 0 of numbers.parquet has a int", "as text"),
    Mistake("a batch that does not divide", ["trainer.global_batch=10"], "trainer.global_batch", "32 samples an iteration", "divisor of 32 such as 8"),
    Mistake("a batch larger than the iteration", ["trainer.global_batch=64"], "trainer.global_batch", "32 samples an iteration", "divisor of 32 such as 32"),
    Mistake("temperature 0", ["rollout.sampling.temperature=0"], "rollout.sampling.temperature", "greedy", "set it above 0"),
    Mistake("one sample a prompt", ["rollout.samples_per_prompt=1", "trainer.global_batch=8"], "rollout.samples_per_prompt", "a group of one", "set it to 2 or more"),
    Mistake("k1 in the loss", ["algorithm.kl_coef=0.1", "algorithm.kl_kind=k1"], "algorithm.kl_kind", "gradient of k1 is zero", "take k2 or k3"),
    Mistake("KL in GRPO's reward", ["algorithm.kl_coef=0.1", "algorithm.kl_placement=reward"], "algorithm.kl_placement", "fixed for the whole sample", "set it to loss"),
    Mistake("PPO with GSPO's loss", [PPO, "algorithm.loss=gspo"], "algorithm.loss", "one advantage a sequence", "take loss=clipped"),
    Mistake("a GPU where there is none", ["trainer.device=cuda"], "trainer.device", "no NVIDIA GPU", "set it to auto or cpu"),
    Mistake("a root that cannot be written", ["storage.root=/proc/millrace"], "storage.root", "cannot write", "correct the path"),
    Mistake("a tracking server that is down", ["tracking.uri=http://127.0.0.1:1"], "tracking.uri", "no MLflow server answers", "leave it out"),
    Mistake("another rate in a run that exists", ["run.name=trained", "trainer.optimizer.lr=1e-5"], "trainer.optimizer.lr", "run trained has 1e-06", "`millrace branch trained NEW --at 2 --root runs`, then train run.name=NEW"),
    Mistake("another source in a run that exists", ["run.name=trained", "data.sources.sums.weight=2"], "data.sources.sums.weight", "run trained has 1.0", "another run.name"),
    Mistake("a run whose data changed", ["run.name=trained", "data.sources.sums.path=mostly.jsonl"], "data.sources.sums.path", "changed under run trained", "data.allow_changes=true"),
    Mistake("a folder of iterations without its run.json", ["run.name=headless"], "run.name", "configuration is gone", "start a new run"),
]  # fmt: skip

REWARDS = '''"""Rewards of somebody who starts."""
import os
import time
def good(sample):
    return float(sample.response == sample.label)
def two(args, sample):
    return 1.0
def raises(sample): return sample.metadata["answer"]


def first_letter(sample):
    # an empty response has none
    return float(sample.response[0] == sample.label[0])
def nothing(sample):
    print("scored")
def pair(sample):
    return 1.0, {"format": 1.0}
def nan(sample):
    return float("nan")
def ends(sample):
    os._exit(3)
def hangs(sample):
    time.sleep(60)
async def slowly(sample):
    return {"reward": True, "format": 0.5}
def tells(sample, key):
    raise OSError(key)
'''


def write_mistakes(folder: Path) -> None:
    """The files, beside those of `write_good`."""
    (folder / "rewards_of_a_newcomer.py").write_text(REWARDS)
    model = folder / "model"
    shutil.copytree(model, folder / "cut")
    weights = (model / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    shutil.copytree(model, folder / "gpt2")
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    shutil.copytree(model, folder / "endless", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "endless" / "tokenizer_config.json").write_text(json.dumps(settings))
    said = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (folder / "silent.jinja").write_text(said)
    (folder / "short.jinja").write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
        + said
        + "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(10)]
    (folder / "array.json").write_text(json.dumps(rows))
    (folder / "indented.json").write_text(json.dumps(rows, indent=2))
    turns = [{"role": role, "content": "1+1="} for role in ("user", "assistant", "user")]
    _lines(folder / "chats.jsonl", [*rows[:3], {"prompt": turns, "label": "2"}, *rows[4:]])
    _lines(folder / "mostly.jsonl", [*rows[:4], *({"text": row["prompt"]} for row in rows[4:])])
    _lines(folder / "lengthy.jsonl", [*rows[:4], *({**row, "prompt": 9 * row["prompt"]} for row in rows[4:])])
    _lines(folder / "some_labels.jsonl", [*rows[:4], {"prompt": "1+1="}, *rows[5:]])
    pq.write_table(pa.Table.from_pylist([{**row, "label": 3} for row in rows]), folder / "numbers.parquet")


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_wrong_place(folder: Path, numbers: int = 5) -> Path:
    """The folder, with all files that the good configuration and wrong ones name, and the runs. numbers: see `write_good`."""
    write_good(folder, numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_mistakes(folder)
        write_runs(folder)
    return folder


def write_runs(folder: Path) -> None:
    """The run `trained`: three of four iterations with a checkpoint after the second; and `headless`, which lost its run.json."""
    from millrace.connectors.storage.prompts import fingerprint, read_source
    from millrace.connectors.storage.run_folder import RunFolder
    from millrace.core.config.reading.load import VERSION, load_config
    from millrace.flows.driver.fingerprints import fingerprints

    config = load_config(str(folder / "run.yaml"), ["run.name=trained"])
    source = config.data.sources[0]
    data = {source.name: fingerprint(source, *read_source(source)).model_dump()}
    run = RunFolder("runs", "trained")
    run.store.write_sealed(
        "run.json",
        {
            "name": "trained",
            "config": config.model_dump(mode="json"),
            "config_version": VERSION,
            "data": [{"since": 0, "sources": data}],
            "fingerprints": fingerprints(config),
            "mlflow_run_id": None,
            "attempts": [],
        },
    )
    for index in range(3):
        run.iteration(index).write_json("manifest.json", {})
    run.iteration(3).write_json("results/sample_prompts.json", {})
    run.store.write_json("checkpoints/000002/complete.json", {})
    RunFolder("runs", "headless").iteration(0).write_json("manifest.json", {})
