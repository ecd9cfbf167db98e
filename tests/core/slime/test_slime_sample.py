"""slime's sample: how its response grows, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.hooks.slime.arguments import address_arguments
from millrace.core.hooks.slime.sample import Arguments, Sample, SlimeStatus, model_url

Status = SlimeStatus
# what is appended, one after the other; then mask, log-probabilities, status
GROWN: dict[str, tuple[list[dict[str, Any]], list[int], list[float], SlimeStatus]] = {
    "a turn": ([{"tokens": [5, 6], "log_probs": [-1, -2]}], [1, 1], [-1.0, -2.0], Status.PENDING),
    "a turn that ends": (
        [{"tokens": [5], "log_probs": [-1], "meta_info": {"finish_reason": {"type": "stop"}}}],
        [1],
        [-1.0],
        Status.COMPLETED,
    ),
    "a turn that is cut": (
        [{"tokens": [5], "log_probs": [-1], "meta_info": {"finish_reason": {"type": "length"}}}],
        [1],
        [-1.0],
        Status.TRUNCATED,
    ),
    "an abort": ([{"meta_info": {"finish_reason": {"type": "abort"}}}], [], [], Status.ABORTED),
    "an end that does not count": (
        [
            {
                "tokens": [5],
                "log_probs": [-1],
                "meta_info": {"finish_reason": {"type": "stop"}},
                "update_terminal_info": False,
            }
        ],
        [1],
        [-1.0],
        Status.PENDING,
    ),
    "an unknown end": ([{"meta_info": {"finish_reason": {"type": "other"}}}], [], [], Status.PENDING),
    "what is observed": ([{"tokens": [5, 6], "trainable": False}], [0, 0], [0.0, 0.0], Status.PENDING),
    "turns and observations": (
        [
            {"tokens": [5], "log_probs": [-1]},
            {"tokens": [7, 8], "trainable": False},
            {"tokens": [6], "log_probs": [-2]},
        ],
        [1, 0, 0, 1],
        [-1.0, 0.0, 0.0, -2.0],
        Status.PENDING,
    ),
    "text alone": ([{"text": "a"}, {"text": "b"}], [], [], Status.PENDING),
    "arrays": (
        [{"tokens": (5, 6), "log_probs": (-1.0, -2.0), "text": "x"}],
        [1, 1],
        [-1.0, -2.0],
        Status.PENDING,
    ),
}


@pytest.mark.parametrize("name", GROWN)
def test_a_response_grows_with_its_mask(name: str) -> None:
    appended, mask, logprobs, status = GROWN[name]
    sample = Sample(tokens=[1, 2])
    tokens = sample.tokens
    for each in appended:
        sample.append_response_tokens(None, **each)
    assert (sample.loss_mask or [], sample.rollout_log_probs or []) == (mask, logprobs)
    assert (sample.status, sample.response_length) == (status, len(mask))
    assert sample.effective_response_length == sum(mask)
    assert sample.tokens is tokens
    assert len(tokens) == 2 + len(mask)
    assert sample.response == "".join(each.get("text", "") for each in appended)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": [5]}, "give log_probs"),
        ({"tokens": [5], "log_probs": [-1, -2]}, "2 log-probabilities for 1 tokens"),
        ({"tokens": [5], "log_probs": [-1], "trainable": False}, "leave log_probs out"),
    ],
)
def test_log_probabilities_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sample().append_response_tokens(None, **given)


def test_lists_that_are_held_elsewhere_grow_with_the_sample() -> None:
    sample = Sample(tokens=[1], loss_mask=[])
    mask = sample.loss_mask
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0])
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert mask == [1, 0]


def test_a_sample_survives_plain_values() -> None:
    sample = Sample(prompt="?", reward={"score": 1}, metadata={"a": 1}, status=Status.TRUNCATED)
    again = Sample.from_dict({**sample.to_dict(), "extra": 3})
    assert (again.prompt, again.status, again.reward, again.extra) == ("?", Status.TRUNCATED, {"score": 1}, 3)  # type: ignore[attr-defined]
    assert again.spec_info == sample.spec_info
    assert again.get_reward_value(Arguments(reward_key="score")) == 1


def test_a_model_that_is_not_served_is_refused() -> None:
    args = Arguments(**address_arguments("http://127.0.0.1:9/v1", "key"), sglang_model_routers=None)
    assert model_url(args, "actor", "/generate") == "http://session:key@127.0.0.1:9/generate"
    with pytest.raises(ValueError, match=r"no model ref: give its address .* \{ref: \[host, port\]\}"):
        model_url(args, "ref")
    args.sglang_model_routers = {"ref": ["10.0.0.1", 80]}
    assert model_url(args, "ref") == "http://10.0.0.1:80/generate"
