"""No secret of a configuration is shown, stored or compared: it is refused where it stands, and a reference takes its place."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from millrace.core import hooks
from millrace.core.config import RunConfig
from millrace.core.config.parts.menu import menu_of, variants
from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.redaction import is_secret_name, shown, shown_text
from millrace.core.config.parts.restart import changes
from millrace.core.config.parts.section import models
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.config.reading.load import load_config, validate
from millrace.core.config.reading.stored import lifted
from millrace.core.contracts.references import resolved, scrubbed
from millrace.core.errors import ConfigError
from millrace.core.rewards.scoring import score_sample

SECRET = "s3cr3t-Planted-0123456789"
LEAST: dict[str, Any] = {
    "run": {"name": "a", "iterations": 1},
    "model": {"path": "model"},
    "data": {"sources": [{"path": "train.jsonl"}]},
}
NEEDED = {
    "function": "package.module:function",
    "name": "a",
    "path": "held_out.jsonl",
    "addresses": ["http://a:1"],
}
KINDS = {"dict": "mapping", "list": "list"}
Place = tuple[str | int, ...]


def places(model: type[BaseModel] = RunConfig, above: Place = ()) -> Iterator[tuple[Place, str]]:
    """Every field that takes text or a mapping, those of all variants and list items too; and what it takes."""
    for name, field in model.model_fields.items():
        here = (*above, name)
        menu = menu_of(field)
        below = variants(field).values() if menu else models(field.annotation)
        annotation = str(field.annotation)
        if "str" in annotation and not below and "Literal" not in annotation:
            yield here, next((what for word, what in KINDS.items() if word in annotation), "text")
        for section in below:
            item = (*here, 0) if getattr(field.annotation, "__origin__", None) is list else here
            kind = section.model_fields["kind"].default if menu else None
            yield from (
                (place, what) for place, what in places(section, (*item, f"kind={kind}") if menu else item)
            )


PLACES = sorted(set(places()), key=str)


def planted(place: Place, value: Any) -> dict[str, Any]:
    """The least configuration with a value at a place, and what its sections need to make sense."""
    values: dict[str, Any] = json.loads(json.dumps(LEAST))
    at: Any = values
    for part, following in zip(place, (*place[1:], None), strict=True):
        if isinstance(part, str) and part.startswith("kind="):
            at["kind"] = part.removeprefix("kind=")
            if at["kind"] == "external":
                at.setdefault("addresses", ["http://a:1"])
            if at["kind"] == "function":
                at.setdefault("function", NEEDED["function"])
        elif following is None:
            at[part] = value
        elif isinstance(part, int):
            at = at[part]
        elif following == 0:
            at = at.setdefault(part, [{"name": "a", "path": "held_out.jsonl"}])
        else:
            at = at.setdefault(part, {})
            if part in ("group_filter", "shaping", "prepare"):
                at.setdefault("function", NEEDED["function"])
    return values


def everything_said(values: dict[str, Any]) -> str:
    config, problems = validate(values)
    said = [str(problem) for problem in problems]
    if config is not None:
        said += [config.model_dump_json(), repr(sorted(config.for_actors().items()))]
    try:
        load_config(None, text=json.dumps(values))
    except ConfigError as error:
        said.append(str(error))
    return "\n".join(said)


def test_there_are_places_of_each_kind() -> None:
    assert {("engines", "kind=external", "key"), ("reward", "options"), ("storage", "root")} <= {
        p for p, _ in PLACES
    }
    assert len(PLACES) > 30
    assert {what for _, what in PLACES} == {"text", "mapping", "list"}


@pytest.mark.parametrize(("place", "kind"), PLACES, ids=[".".join(map(str, place)) for place, _ in PLACES])
def test_a_secret_planted_there_is_nowhere_in_what_is_said_or_kept(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", SECRET)
    urls = [
        f"s3://K:{SECRET}@bucket/x.jsonl",
        f"https://{SECRET}@host/x.jsonl",
        f"https://h/x.jsonl?api_key={SECRET}",
    ]
    given: list[Any] = [*urls, "${env:PLANTED}"]
    if kind == "mapping":
        given = [
            {"api_key": SECRET},
            {"deep": [{"hf_token": SECRET}]},
            *({"url": url} for url in urls),
            {"b": "${env:PLANTED}"},
        ]
    elif kind == "list":
        given = [[item] for item in given]
    for value in given:
        said = everything_said(planted(place, value))
        assert said
        assert SECRET not in said, value
    wrong = everything_said(
        planted(place, {"url": urls[0], "api_key": SECRET, "more": [urls[1]]})
    )  # of another type
    assert SECRET not in wrong


def test_a_secret_that_cannot_be_parsed_or_found_its_place_is_not_shown_either() -> None:
    for text in (
        f"reward:\n  options: {{api_key: {SECRET}",
        f"a:\n  password: '{SECRET}'\n b: s3://u:{SECRET}@h",
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(None, text=text)
        assert SECRET not in str(caught.value)
    for override in (
        f"reward.options.api_key={SECRET}",
        f"no.such.token={SECRET}",
        f"storage.root=s3://K:{SECRET}@b",
        f"x.password {SECRET}: [",
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [override], text=json.dumps(LEAST))
        if "=" in override:
            assert SECRET not in str(caught.value)


def test_a_refused_secret_names_its_field_and_the_remedy() -> None:
    for override, field, remedy in (
        ("reward.options.api_key=x1", "reward.options.api_key", "${env:NAME}"),
        ("storage.root=s3://K:x1@bucket", "storage.root = 's3://***@bucket'", "AWS_SECRET_ACCESS_KEY"),
        ("model.path=https://u:x1@host/m", "model.path", "environment"),
        ("tracking.uri=http://u:x1@host", "tracking.uri", "MLFLOW_TRACKING_PASSWORD"),
        ("storage.root=${env:ROOT}", "storage.root", "replaced in options of your functions"),
        (
            "engines={kind: external, addresses: ['http://a:1'], key: x1}",
            "engines.key = '***'",
            "${env:NAME}",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [override], text=json.dumps(LEAST))
        said = " ".join(str(caught.value).split())
        assert field in said
        assert remedy in said


def test_other_words_are_no_secrets() -> None:
    for name in (
        "max_tokens",
        "eos_token",
        "stop_token",
        "stop_token_ids",
        "prompt_key",
        "tokenizer",
        "key",
        "keywords",
    ):
        assert not is_secret_name(name), name
    assert shown({"max_tokens": 5, "url": "s3://bucket/a@b", "api_key": "${env:K}"}) == {
        "max_tokens": 5,
        "url": "s3://bucket/a@b",
        "api_key": "${env:K}",
    }
    assert str(Problem("a.b", "x" * 10**6, "r", "m")).count("x") < 100


def test_long_texts_are_read_through_in_no_time() -> None:
    started = time.perf_counter()
    for part in ("a", "a.", "a-", "://", "token", "?a&", "s3://a:"):
        shown_text(part * 20_000)
    assert time.perf_counter() - started < 5


def test_two_secrets_are_no_change_of_the_configuration() -> None:
    def config(value: Any, **more: Any) -> RunConfig:
        return RunConfig.model_validate({**LEAST, "reward": {"options": {"api_key": value, **more}}})

    same = ("one", "two", "${env:A}", "${env:B}")
    for before in same:
        for now in same:
            assert not list(changes(config(before), config(now)))
    assert not list(changes(config("a", judge="${env:A}"), config("a", judge="${env:B}")))
    (change,) = changes(config("secret-a", n=1), config("secret-b", n=2))
    assert change.path == "reward.options"
    assert "secret" not in f"{change}"
    stored = {"name": "a", "config_version": 2, "config": config("old literal").model_dump(mode="json")}
    assert RunConfig.model_validate(lifted(stored)["config"]).reward.options == {"api_key": "old literal"}


def judged(sample: object, key: str, deep: dict[str, list[str]]) -> float:
    assert (key, deep) == (SECRET, {"more": [f"Bearer {SECRET}"]})
    return 1.0


def complains(*_: object, key: str) -> None:
    raise ValueError(f"the judge refuses {key}")


def test_references_are_replaced_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_judge", sys.modules[__name__])
    options = {"key": "${env:JUDGE}", "deep": {"more": ["Bearer ${env:JUDGE}"]}}
    row = {
        "prompt": '"a"',
        "response": "b",
        "label": None,
        "metadata": None,
        "response_length": 1,
        "status": "completed",
    }
    monkeypatch.delenv("JUDGE", raising=False)
    with pytest.raises(ConfigError, match="refers to JUDGE, which is not set"):
        score_sample("my_judge:judged", options, row)
    monkeypatch.setenv("JUDGE", SECRET)
    assert score_sample("my_judge:judged", options, row)["reward"] == 1.0
    assert (
        hooks.load_function(UserFunction(function="my_judge:judged", options=options), "reward")(None) == 1.0
    )
    assert resolved(7, "x") == 7
    with pytest.raises(ConfigError) as caught:
        hooks.call_function(
            UserFunction(function="my_judge:complains", options={"key": "${env:JUDGE}"}), "algorithm.loss"
        )
    assert "refuses ${env:JUDGE}" in str(caught.value)
    assert caught.value.__cause__ is None
    assert scrubbed(f"{os.environ['JUDGE']}!", options) == "${env:JUDGE}!"
