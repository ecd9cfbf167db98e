"""The hooks' signatures are a promise to users: a change shows here, as a difference."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from millrace.core.config import UserFunction
from millrace.core.errors import ConfigError, LeaseHeldError, MillraceError, TrainerError
from millrace.core.hooks import loading, protocols

SIGNATURES = {
    "rows": "(**options: Any) -> NumberedRows",
    "reward": "(sample: RewardInput, **options: Any) -> Score | Awaitable[Score]",
    "group_filter": "(samples: Sequence[GroupSample], **options: Any) -> str | None",
    "buffer_filter": "(groups: Sequence[BufferedGroup], **options: Any) -> Sequence[BufferedGroup]",
    "teacher_hint": "(sample: RewardInput, **options: Any) -> str | None",
    "reward_shaping": "(rewards: Tensor, response_lengths: Tensor, truncated: Tensor, **options: Any) -> Tensor",
    "advantage": "(rewards: Tensor, group_ids: Tensor, **options: Any) -> Tensor",
    "loss": "(batch: TokenBatch, **options: Any) -> tuple[Tensor, Mapping[str, tuple[Tensor, Tensor]]]",
}
FIELDS = {
    protocols.RewardInput: "prompt response label metadata response_length status messages",
    protocols.RewardResult: "reward parts answer",
    protocols.BufferedGroup: "iteration ordinal source age uses reward reward_std",
    protocols.GroupSample: "sample_id reward scoring response_length truncated parts input",
}


def test_signatures_are_frozen() -> None:
    now = {
        name: str(inspect.signature(hook.__call__)).replace("'", "").replace("(self, ", "(")
        for name, hook in protocols.HOOKS.items()
    }
    assert now == SIGNATURES


def test_what_hooks_see_is_frozen() -> None:
    assert {kind: " ".join(item.name for item in fields(kind)) for kind in FIELDS} == FIELDS


def test_load_finds_functions() -> None:
    from millrace.core.rewards.text import exact_match

    assert loading.load("millrace.core.rewards.text:exact_match") is exact_match


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("millrace.core.rewards.text", "package.module:function"),
        ("millrace.core.rewards.text:", "package.module:function"),
        ("no_such_package.module:f", "PYTHONPATH"),
        ("millrace.core.rewards.text:no_such", "has no function no_such"),
        ("millrace.core.hooks.group_filters:ZERO_VARIANCE", "name a function"),
    ],
)
def test_load_refuses_naming_field_path_and_remedy(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        loading.load(path, "reward.function")
    assert f"reward.function = {path}" in str(caught.value)


def fails(*args: object, **options: object) -> None:
    raise ZeroDivisionError(f"{args} {options}")


def test_what_a_function_raises_names_field_and_function(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_functions", sys.modules[__name__])
    function = UserFunction(function="my_functions:fails", options={"x": 1})
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: \(2,\) \{'x': 1\}") as caught:
        loading.call_function(function, "algorithm.loss", 2)
    assert caught.value.where == "algorithm.loss.function = my_functions:fails"


def refuses(error: type[MillraceError], *, key: str) -> None:
    where = "https://host/?api_key=n0-reference"
    raise error(f"the service refuses {key}", where=where, remedy=f"ask who gave you {key}")


def test_an_error_of_millraces_that_a_users_function_raises_is_the_users_and_shows_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_functions", sys.modules[__name__])
    monkeypatch.setenv("JUDGE", "s3cr3t-of-a-judge")
    function = UserFunction(function="my_functions:refuses", options={"key": "${env:JUDGE}"})
    for error in (MillraceError, TrainerError, LeaseHeldError):
        with pytest.raises(ConfigError) as caught:
            loading.call_function(function, "algorithm.loss", error)
        assert str(caught.value) == (
            f"algorithm.loss.function = my_functions:refuses: it raised {error.__name__}: "
            "https://host/?api_key=*** the service refuses "
            "${env:JUDGE}; ask who gave you ${env:JUDGE} in test_hooks.py, "
            f"line {refuses.__code__.co_firstlineno + 2}; correct the function and start the run again"
        )
        assert caught.value.__cause__ is None


def test_errors_of_millraces_own_functions_pass(tmp_path: Path) -> None:
    function = UserFunction(function="millrace.connectors.host.process_identity:read_record")
    with pytest.raises(MillraceError) as caught:
        loading.call_function(function, "run.prepare", tmp_path)
    assert type(caught.value) is MillraceError
