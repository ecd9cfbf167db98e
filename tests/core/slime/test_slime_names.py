"""Names of slime's that hooks import: each that its pages import is here, or is refused with the way to do it here."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.core.hooks.slime import hub, names
from millrace.core.hooks.slime.sample import Sample

PAGES = (Path(__file__).with_name("slime_names.txt")).read_text().split()
HERE = [name for name in PAGES if not names.missing(name)]
REFUSED = [name for name in PAGES if names.missing(name)]


@pytest.fixture(autouse=True, scope="module")
def provided() -> None:
    names.provide()


def imported(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    scope: dict[str, Any] = {}
    exec(f"from {module} import {attribute}", scope)
    return scope[attribute]


def test_the_pages_names_are_of_both_kinds() -> None:
    assert (len(PAGES), len(HERE), len(REFUSED)) == (len(set(PAGES)), 29, 29)


@pytest.mark.parametrize("name", HERE)
def test_a_name_that_is_here_can_be_imported(name: str) -> None:
    assert imported(name) is not None
    assert imported(name) is imported(name)


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_is_not_here_says_why_and_what_to_do(name: str) -> None:
    with pytest.raises(names.NotHereError, match="^slime") as refused:
        imported(name)
    assert names.refusal(name) not in (names.UNKNOWN, None), "a page's name has its own reason"
    assert refused.value.remedy == names.refusal(name)[1]
    assert names.slime_remedy(refused.value) == refused.value.remedy


@pytest.mark.parametrize(
    "name",
    [
        "slime.utils.no_such_module.thing",
        "slime.utils.types.NoSuchClass",
        "slime.rollout.no_such_hub.f",
        "slime.no_such_package.module.f",
        "slime.utils.mask_utils.MultiTurnLossMaskGenerator",
        "slime.utils.ppo_utils.compute_approx_kl",
        "slime.utils.seqlen_balancing.get_seqlen_balanced_partitions",
        "slime.router.middleware.Radix",
        "slime_plugins.rollout_buffer.generator.base_generator.query",
        "slime.rollout.rm_hub.no_such_reward",
    ],
)
def test_an_unknown_name_is_refused_by_its_name(name: str) -> None:
    assert names.missing(name)
    with pytest.raises(ImportError, match=name.split(".")[0]) as refused:
        imported(name)
    assert "docs/algorithms.md#your-functions" in str(names.slime_remedy(refused.value))


def test_what_an_import_hides_keeps_its_remedy() -> None:
    def sandbox() -> None:
        try:
            importlib.import_module("slime.agent.sandbox")
        except ImportError as error:
            raise ImportError("the sandbox is not installed") from error

    with pytest.raises(ImportError, match="not installed") as hidden:
        sandbox()
    assert "session.base_url" in str(names.slime_remedy(hidden.value))
    assert names.slime_remedy(ImportError("No module named torch")) is None


def test_attributes_that_python_asks_of_modules_are_not_names_of_slimes() -> None:
    module = importlib.import_module("slime.utils.types")
    assert not hasattr(module, "__wrapped__")


# type, response, label, and its reward
SCORES = [
    ("math", "so \\boxed{4}", "4", 1),
    ("math", "so 4", "4", 0),
    ("boxed_f1", "so \\boxed{the cat}", "a cat", 1.0),
    ("dapo", "Answer: 4", "4", {"score": 1.0, "acc": True, "pred": "4"}),
    ("dapo", "4", "4", {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
    ("deepscaler", "<think>2</think> \\boxed{4}", "4", 1.0),
    ("deepscaler", "\\boxed{4}", "4", 0.0),
    ("f1", "the cat", "a cat", 1.0),
    ("gpqa", "the answer is B", "B", 1.0),
    ("gpqa", "the answer is C", "B", 0.0),
]


@pytest.mark.parametrize(("kind", "response", "label", "reward"), SCORES)
async def test_types_of_rewards_score_as_millraces_own(
    kind: str, response: str, label: str, reward: Any
) -> None:
    args = SimpleNamespace(rm_type=kind)
    sample = Sample(response=response, label=label)
    assert await hub.async_rm(args, sample) == reward
    assert await hub.batched_async_rm(args, [sample, sample]) == [reward, reward]
    with pytest.raises(ValueError, match="rm_type = 'codes' is not one of dapo"):
        await hub.async_rm(args, Sample(metadata={"rm_type": "codes"}))


def test_filters_of_slimes_hub_keep_groups_whose_rewards_differ() -> None:
    args = SimpleNamespace(reward_key=None)
    same = [Sample(reward=1.0), Sample(reward=1.0)]
    assert names.check_reward_nonzero_std(args, [*same, Sample(reward=0.0)]).keep
    dropped = names.check_reward_nonzero_std_with_fallback(args, same)
    assert (dropped.keep, dropped.reason, dropped.keep_when_insufficient) == (False, "zero_std_1.0", True)
    assert names.should_drop_dynamic_filter_output(dropped, remaining_batch_size=9, target_data_size=8)
    assert not names.should_drop_dynamic_filter_output(dropped, remaining_batch_size=8, target_data_size=8)
    assert names.call_dynamic_filter(None).keep
    assert names.call_dynamic_filter(lambda args, samples: False, args, same).keep is False


def test_what_only_traces_or_makes_once_lets_code_run() -> None:
    @names.trace_function("step", target="sample")
    async def step(sample: Sample) -> int:
        with names.trace_span(sample, "inner", attrs={"n": 1}) as span:
            span.update(names.build_sglang_meta_trace_attrs({"completion_tokens": 3, "finish_reason": {}}))
            names.trace_event(names.bind_trace(sample) and sample, "event")
        return 3

    assert asyncio.run(step(Sample())) == 3

    class Service(metaclass=names.SingletonMeta):
        def __init__(self, args: Any) -> None:
            self.args = args

    assert Service(1) is Service(2)
    assert names.load_function("slime.utils.types.Sample") is Sample
    assert names.load_processor("model") is None
