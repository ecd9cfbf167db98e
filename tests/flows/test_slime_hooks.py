"""Hooks as slime's pages print them: `check` accepts each, or refuses it with the reason and the way to do it here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from millrace.core.config import RunConfig
from millrace.flows.preflight.check_hooks import check_hooks

SOURCE = """
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.processing_utils import encode_image_for_rollout_engine, load_tokenizer
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    longest = args.rollout_max_context_len or args.context_parallel_size * args.max_tokens_per_gpu
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"text": sample.prompt, "sampling_params": sampling_params})
    for turn in range(args.max_turns):
        sample.remove_sample = len(sample.tokens) > longest
    return sample


async def generate_in_evaluation(args, sample, sampling_params, evaluation=False):
    return sample


async def generate_samples(args, samples, evaluation=False):
    return samples


async def generate_with_more(args, sample, sampling_params):
    return await post(args.search_url, {"k": args.topk, "n": getattr(args, "least", 1)})


async def generate_for_agents(args, sample, sampling_params):
    from slime.agent.adapters import AnthropicAdapter


async def generate_with_unknown(args, sample, sampling_params):
    from slime.utils.brand_new import thing


async def generate_alone(args):
    return None


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    return None


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    return float(sample.response == sample.label)


def reward_at_once(args, sample):
    return {"score": 1.0, "acc": 0}


async def batched_custom_rm(args, samples, **kwargs):
    return [0.0 for _ in samples]


async def reward_of_tokens(args, sample, **kwargs):
    return len(sample.tokens)


async def reward_by_url(args, sample, **kwargs):
    return await post(args.rm_url, {"response": sample.response})


class RewardModel:
    def __init__(self, model_path):
        self.model = model_path

    def compute_reward(self, prompts, responses):
        return [1.0 for _ in responses]


class RewardModelOfArgs:
    def __init__(self, args):
        self.path = args.path

    def compute_reward(self, prompts, responses):
        return [1.0 for _ in responses]


def check_std(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    return len(set(rewards)) > 1


def filter_of_masks(args, samples, **kwargs):
    return any(sum(sample.loss_mask) for sample in samples)


def rollout_sample_filter(args, samples):
    for sample in samples:
        sample.remove_sample = sample.response_length > 9


def pop_first(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


def post_process(args, samples):
    return [], []


def custom_loss(args, batch, logits, sum_of_sample_mean):
    return None


def custom_advantage(args, rollout_data):
    return None


class Source:
    def get_samples(self, num_samples):
        return []
"""
GENERATE, REWARD, FILTER = "rollout.session.function", "reward", "filter.group_filter"
ACCEPTED: list[tuple[str, str, dict[str, Any]]] = [
    (GENERATE, "generate", {}),
    (GENERATE, "generate_in_evaluation", {}),
    (GENERATE, "generate_samples", {}),
    (GENERATE, "generate_with_more", {"search_url": "http://127.0.0.1:8000", "topk": 3}),
    (REWARD, "reward_func", {}),
    (REWARD, "reward_at_once", {"reward_key": "score"}),
    (REWARD, "batched_custom_rm", {"group": True}),
    (REWARD, "reward_by_url", {"rm_url": "http://127.0.0.1:8000"}),
    (REWARD, "RewardModel", {"model_path": "model"}),
    (REWARD, "RewardModel", {"model_path": "model", "reward_key": None}),
    (REWARD, "RewardModelOfArgs", {"path": "model"}),
    (FILTER, "check_std", {}),
    (FILTER, "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", {}),
    (FILTER, "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback", {}),
    (REWARD, "slime.rollout.rm_hub.async_rm", {"rm_type": "math"}),
]
REFUSED: list[tuple[str, str, str, str]] = [  # field, function, why, the way
    (GENERATE, "generate_with_more", "reads args.search_url (hooks", "options: {search_url: ...}"),
    (GENERATE, "generate_for_agents", "imports slime.agent.adapters.AnthropicAdapter", "session.base_url"),
    (
        GENERATE,
        "generate_with_unknown",
        "slime.utils.brand_new.thing",
        "docs/algorithms.md#your-functions",
    ),
    (GENERATE, "generate_alone", "cannot be called with (args, sample, sampling_params)", "these parameters"),
    (GENERATE, "generate_rollout", "functions of a whole rollout are not taken", "rollout.session.function"),
    (
        GENERATE,
        "slime.rollout.sglang_rollout.generate_rollout",
        "of a whole rollout",
        "what makes one sample",
    ),
    (GENERATE, "slime.rollout.fully_async_rollout.generate_rollout_fully_async", "ahead", "pipeline.ahead"),
    (REWARD, "reward_of_tokens", "sample.tokens (hooks", "response_length"),
    (REWARD, "reward_by_url", "reads args.rm_url", "options: {rm_url: ...}"),
    (REWARD, "RewardModel", "missing a required argument: 'model_path'", "its parameters are"),
    (REWARD, "slime.rollout.on_policy_distillation.reward_func", "teacher", "algorithm.teacher_server"),
    (FILTER, "filter_of_masks", "sample.loss_mask (hooks", "response_length"),
    (FILTER, "rollout_sample_filter", "sets remove_sample (hooks", "rollout.session.function"),
    ("rollout.buffer.buffer_filter", "pop_first", "chooses among trained groups", "millrace.BufferedGroup"),
    ("algorithm.shaping", "post_process", "raw and normalised rewards", "algorithm.advantage"),
    ("algorithm.loss", "custom_loss", "the logits", "millrace.TokenBatch"),
    ("algorithm.advantage", "custom_advantage", "token tensors", "advantage(rewards, group_ids)"),
    ("data.sources", "Source", "takes them back", "a list of rows"),
]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "hooks_of_slime.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "hooks_of_slime"
    sys.modules.pop("hooks_of_slime", None)


def problems(module: str, field: str, name: str, options: dict[str, Any]) -> list[Any]:
    path = f"slime:{name if name.startswith('slime.') else f'{module}.{name}'}"
    values: dict[str, Any] = {
        "run": {"name": "a"},
        "model": {"path": "model"},
        "data": {"sources": [{"name": "sums", "path": "train.jsonl"}]},
        "rollout": {"prompts": 4, "samples_per_prompt": 2},
        "algorithm": {"correction": {"kind": "truncate"}},
    }
    options = dict(options)
    hook = {"function": path, **({"group": True} if options.pop("group", False) else {}), "options": options}
    section = values
    *parts, last = ("data.sources" if field == "data.sources" else field).split(".")
    for part in parts:
        section = section.setdefault(part, {})
    kind = {"kind": "function"} if field in ("algorithm.loss", "algorithm.advantage") else {}
    section[last] = [{"name": "own", "rows": hook}] if field == "data.sources" else {**kind, **hook}
    return [
        problem
        for problem in check_hooks(RunConfig.model_validate(values))
        if problem.field.startswith(field)
    ]


@pytest.mark.parametrize(("field", "name", "options"), ACCEPTED)
def test_a_hook_of_slimes_pages_is_accepted(module: str, field: str, name: str, options: Any) -> None:
    assert problems(module, field, name, options) == []


@pytest.mark.parametrize(("field", "name", "reason", "remedy"), REFUSED)
def test_a_hook_that_is_not_taken_is_refused_with_the_way(
    module: str, field: str, name: str, reason: str, remedy: str
) -> None:
    found = problems(module, field, name, {})
    assert any(reason in each.reason and remedy in each.remedy for each in found), found
    assert all("Error" not in each.reason for each in found), found


def test_the_tables_name_every_hook_of_the_module(module: str) -> None:
    import hooks_of_slime  # type: ignore[import-not-found]

    own = {
        name for name, value in vars(hooks_of_slime).items() if getattr(value, "__module__", None) == module
    }
    assert own <= {name for _, name, *_ in [*ACCEPTED, *REFUSED]}
    assert Path(hooks_of_slime.__file__).is_file()
