"""The forms of a reward: function or class, sync or async, alone or of a group, a mixture, and slime's signature."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from millrace.core.errors import ConfigError
from millrace.core.rewards.scoring import score_group, score_sample, score_side_by_side
from millrace.core.rewards.trial import try_reward
from tests.support import reward_forms

FORMS = "tests.support.reward_forms"


def row(response: str) -> dict[str, Any]:
    return {
        "prompt": '"?"',
        "response": response,
        "label": '"x"',
        "metadata": json.dumps({"level": 1}),
        "response_length": 1,
        "status": "completed",
    }


@pytest.mark.parametrize("name", ["Length", "AsyncLength"])
def test_a_class_is_made_once_for_each_set_of_options(name: str) -> None:
    path = f"{FORMS}:{name}"
    first, *others = [score_sample(path, {"scale": 2.0}, row("ab")) for _ in range(3)]
    assert {each["reward"] for each in (first, *others)} == {4.0}
    assert others == [first, first]
    again = score_sample(path, {"scale": 3.0}, row("ab"))
    assert (again["reward"], again["parts"]["made"]) == (6.0, first["parts"]["made"] + 1)


def test_a_class_that_cannot_be_made_or_called_fails_the_sample() -> None:
    with pytest.raises(ValueError, match="no index"):
        score_sample(f"{FORMS}:FailsWhereItIsMade", {}, row(""))
    with pytest.raises(ConfigError, match="cannot be called; give it a method __call__"):
        score_sample(f"{FORMS}:Uncallable", {}, row(""))
    assert "no index" in try_reward(f"{FORMS}:FailsWhereItIsMade", {}, row(""))["problem"]


@pytest.mark.parametrize("name", ["rank", "rank_awaited"])
def test_a_group_is_scored_in_one_call(name: str) -> None:
    rows = [row("abc"), row("a"), row("ab")]
    assert [each["reward"] for each in score_group(f"{FORMS}:{name}", {}, rows)] == [2.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("too_few", ValueError, "returned 1 scores for 2 samples"),
        ("one_number", TypeError, "returned a float for a group"),
    ],
)
def test_an_answer_that_is_no_list_of_scores_fails_the_group(
    name: str, error: type[Exception], said: str
) -> None:
    rows = [row("a"), row("b")]
    with pytest.raises(error, match=said):
        score_group(f"{FORMS}:{name}", {}, rows)
    assert said in try_reward(f"{FORMS}:{name}", {}, rows)["problem"]


def test_a_mixture_weighs_parts_of_every_form_and_keeps_them() -> None:
    parts = [
        {"function": f"{FORMS}:AsyncLength", "weight": 0.5, "options": {"scale": 2}, "name": "length"},
        {"function": "millrace.core.rewards.text:contains", "weight": -1},
        f"{FORMS}:hostile",
    ]
    scored = score_sample("millrace.core.rewards.format:mixture", {"parts": parts}, row("xyz"))
    assert scored["reward"] == 0.5 * 6 - 1 + 3
    assert scored["parts"].pop("length.made") >= 1
    assert scored["parts"] == {"length": 6.0, "contains": 1.0, "hostile": 3.0}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"weight": 1}, "names no function"),
        ({"function": f"{FORMS}:hostile", "wieght": 1}, "unknown keys: wieght"),
        ({"function": f"{FORMS}:hostile", "weight": "1"}, "has the weight '1'"),
        ({"function": f"{FORMS}:nothing"}, "has no function nothing"),
    ],
)
def test_a_part_of_another_form_is_named(part: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward.options.parts.0.*{said}"):
        score_sample("millrace.core.rewards.format:mixture", {"parts": [part]}, row("x"))


def test_a_mixture_keeps_texts_and_the_first_answer() -> None:
    parts = [
        f"{FORMS}:length_in_words",
        "millrace.core.rewards.text:exact_match",
        "millrace.core.rewards.format:finished",
    ]
    scored = score_sample("millrace.core.rewards.format:mixture", {"parts": parts}, row("it is 7.0"))
    assert scored["answer"] == "it is 7.0"
    assert scored["parts"]["length_in_words.words"] == "9 letters"


def test_two_parts_of_one_name_are_refused() -> None:
    parts = [f"{FORMS}:hostile", f"{FORMS}:hostile"]
    with pytest.raises(ConfigError, match="give each part its own name"):
        score_sample("millrace.core.rewards.format:mixture", {"parts": parts}, row("x"))


def test_slimes_signature_is_called_with_arguments_and_a_sample() -> None:
    options = {"scale": 0.5, "reward_key": "score"}
    scored = score_sample(f"slime:{FORMS}.slime_length", options, row("abcd"))
    assert scored == {"reward": 2.0, "parts": {"acc": 1.0, "pred": "x", "label": "x"}, "answer": None}
    group = score_group(f"slime:{FORMS}.slime_group", {}, [row("a"), row("b")])
    assert [each["reward"] for each in group] == [0.0, 1.0]
    with pytest.raises(AttributeError, match="args has no scale here: give it in the function's options"):
        score_sample(f"slime:{FORMS}.slime_length", {"reward_key": "score"}, row("a"))
    with pytest.raises(AttributeError, match="see no token ids"):
        score_sample(f"slime:{FORMS}.slime_tokens", {}, row("a"))


@pytest.mark.parametrize(
    ("name", "options", "rewards"),
    [
        ("Lengths", {"model_path": "model"}, [1.0, 3.0]),
        ("Lengths", {"model_path": "model", "scale": 2.0}, [2.0, 6.0]),
        ("LengthsOfArgs", {"scale": 0.5}, [1.5, 2.5]),
    ],
)
def test_a_class_of_slimes_scores_batches(name: str, options: dict[str, Any], rewards: list[float]) -> None:
    path, rows = f"slime:{FORMS}.{name}", [row("a"), row("abc")]
    assert [each["reward"] for each in score_group(path, options, rows)] == rewards
    made = reward_forms.Lengths.made
    assert [score_sample(path, options, each)["reward"] for each in rows] == rewards
    assert [ended[1]["reward"] for ended in score_side_by_side(path, options, rows, "reward", 9.0)] == rewards  # type: ignore[index]
    assert reward_forms.Lengths.made == made, "it is made once for its options"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (f"slime:{FORMS}.TooFewScores", "it returned 1.0 for 1 samples: return a list"),
        (f"slime:{FORMS}.NoReward", "NoReward have no method compute_reward"),
        (f"slime:{FORMS}.Lengths", "missing 1 required positional argument: 'model_path'"),
        (
            f"{FORMS}:TooFewScores",
            f"name one with compute_reward(prompts, responses) as slime:{FORMS}.TooFewScores",
        ),
    ],
)
def test_a_class_that_scores_no_batches_is_said(path: str, said: str) -> None:
    tried = try_reward(path, {}, row("a"))
    assert said in f"{tried['problem']}; {tried['remedy']}"


def test_rows_are_scored_side_by_side_and_each_ends_by_itself() -> None:
    started = time.monotonic()
    rows = [row(text) for text in ("fine", "never", "late", "raises", "cancelled", "words", *["fine"] * 20)]
    ended = score_side_by_side(f"{FORMS}:waits", {}, rows, "reward", 1.0)
    assert time.monotonic() - started < 10
    assert ended[0] == ended[-1] == ("done", {"reward": 4.0, "parts": {}, "answer": None})
    assert ended[1] == ("timed_out", "no answer within 1 s")
    kinds, reasons = zip(*ended[2:6], strict=True)
    assert kinds == ("failed",) * 4
    for reason, said in zip(
        reasons, ("TimeoutError: mine", "KeyError", "CancelledError: closed", "of type str"), strict=True
    ):
        assert said in reason
