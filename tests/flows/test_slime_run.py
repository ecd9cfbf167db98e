"""A training run made of slime's hooks as its pages print them: generate over a list of samples, a class reward, a dynamic filter.

It has a chat template of its own, so that its export is tried with the tokenizer that another program loads from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.support.flow_runs import Workplace

pytestmark = pytest.mark.slow  # some minutes of whole runs and processes

HOOKS = '''
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, samples: list[Sample], evaluation=False) -> list[Sample]:
    """Two answers with an observation between them, which is not trained; of a long answer the last is left out."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    seen = state.tokenizer("?", add_special_tokens=False)["input_ids"]
    for sample in samples:
        sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        for turn in range(2):
            payload = {"input_ids": sample.tokens, "sampling_params": args.sampling_params, "return_logprob": True}
            output = await post(url, payload)
            pairs = output["meta_info"]["output_token_logprobs"]
            sample.append_response_tokens(
                args,
                tokens=[pair[1] for pair in pairs],
                log_probs=[pair[0] for pair in pairs],
                meta_info=output["meta_info"],
                text=output["text"],
            )
            if turn == 0:
                sample.append_response_tokens(args, tokens=seen, trainable=False, text="?")
        sample.status = Sample.Status.COMPLETED
    return samples


class RewardModel:
    """As a reward model: made once a process, asked with the prompts and responses of a group."""

    def __init__(self, args):
        self.scale = args.scale

    def compute_reward(self, prompts, responses):
        assert len(prompts) == len(responses)
        return [self.scale * sum(map(ord, response)) % 7 for response in responses]


def check_reward_nonzero_std(args, samples: list[Sample], **kwargs) -> DynamicFilterOutput:
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = len(set(rewards)) > 1
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{rewards[0]}")
'''
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'user' %}Q: {% endif %}"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def run(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two iterations."""
    root = tmp_path_factory.mktemp("slime")
    (workplace.folder / "page_hooks.py").write_text(HOOKS)
    (root / "own.jinja").write_text(TEMPLATE)
    hooks: dict[str, dict[str, Any]] = {
        "rollout.session": {"function": "slime:page_hooks.generate", "max_tokens": 24},
        "reward": {"function": "slime:page_hooks.RewardModel", "group": True, "options": {"scale": 3}},
        "filter.group_filter": {"function": "slime:page_hooks.check_reward_nonzero_std"},
    }
    workplace.train(
        root,
        *(f"{field}={json.dumps(value)}" for field, value in hooks.items()),
        *(
            "run.iterations=2",
            "run.import_from=[.]",
            "evaluation.sets=[]",
            "algorithm.correction.kind=truncate",
        ),
        *(f"model.chat_template={root}/own.jinja", "data.sources.0.chat=true"),
    )
    return root / "a"


def test_the_run_trains_what_the_hooks_made_token_for_token(run: Path) -> None:
    rows = [
        row
        for part in sorted(run.glob("iterations/*/batch.parquet"))
        for row in pq.read_table(part).to_pylist()
    ]
    assert rows
    for row in rows:
        text, mask = row["response"], row["loss_mask"]
        assert row["scoring"] == "scored"
        assert row["reward"] == 3 * sum(map(ord, text)) % 7
        assert mask.count(0) == 1  # the observation
        assert len(mask) == row["response_length"]
    groups: dict[str, set[float]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], set()).add(row["reward"])
    assert all(len(rewards) > 1 for rewards in groups.values())  # as the filter has it


def test_its_export_makes_of_a_chat_what_the_run_made_of_it(run: Path) -> None:
    drawn = pq.read_table(run / "iterations/000000/prompts.parquet").to_pylist()[0]
    chat = [{"role": "user", "content": json.loads(drawn["prompt"])}]
    tokenizer = AutoTokenizer.from_pretrained(run / "exports/000002")
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == drawn["prompt_tokens"]
    assert text.startswith("<user>Q: ")
