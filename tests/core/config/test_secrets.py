"""No secret of a configuration is shown, stored or compared: it is refused where it stands, and a reference takes its place."""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import Problem
from millrace.core.config.parts.redaction import is_known_secret, is_secret_name, shown, shown_text
from millrace.core.config.parts.restart import changes
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.config.reading.load import load_config, validate
from millrace.core.config.reading.overrides import apply
from millrace.core.config.secret_rules import is_replaced
from millrace.core.contracts.references import blocks, pass_on, references, resolved, scrubbed, variables
from millrace.core.errors import ConfigError
from millrace.core.hooks import loading as hooks
from millrace.core.rewards.scoring import score_sample
from tests.support.secret_places import PLACES, Place, path

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
            if part in ("group_filter", "buffer_filter", "shaping", "prepare", "hint"):
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


def test_the_page_of_security_names_every_place_that_takes_a_reference() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    for field in sorted({path(place) for place, _ in PLACES if is_replaced(path(place))}):
        last = field.rpartition(".")[2]
        if last == "options":
            named = "the options of your functions"
        elif ".mcp." in field:
            named = "`env` and `headers` of an MCP server"
        else:
            named = f"`{field}`"
        assert named in page, field


@pytest.mark.parametrize(("place", "kind"), PLACES, ids=[".".join(map(str, place)) for place, _ in PLACES])
def test_a_secret_planted_there_is_nowhere_in_what_is_said_or_kept(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", SECRET)
    monkeypatch.setenv("MILLRACE_BLOCK_PLANTED_1", SECRET)
    urls = [
        f"s3://K:{SECRET}@bucket/x.jsonl",
        f"https://{SECRET}@host/x.jsonl",
        f"https://h/x.jsonl?api_key={SECRET}",
    ]
    given: list[Any] = [*urls, "${env:PLANTED}", "${prefect:planted-1}"]
    if kind == "mapping":
        given = [
            {"api_key": SECRET},
            {"deep": [{"hf_token": SECRET}]},
            *({"url": url} for url in urls),
            {"b": "${env:PLANTED}", "c": ["${prefect:planted-1}"]},
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


SAID = {  # how a text holds a secret, and what of it is shown
    "Authorization: Bearer {}": "Authorization: ***",
    "{{Authorization: 'Bearer {}', a: 1}}": "{Authorization: '***', a: 1}",
    "Proxy-Authorization = Basic {}": "Proxy-Authorization = ***",
    "it sent Bearer {} and failed": "it sent Bearer *** and failed",
    "api_key='{} more words'": "api_key='***'",
    'password: "{} with \\" a quote" # said': 'password: "***" # said',
    "password: '{} of a line that ends": "password: '***",
    "api_key={},{}": "api_key=***",
    "{{api_key: {}, b: 1}}": "{api_key: ***, b: 1}",
    "?api_key={},x&b=1": "?api_key=***&b=1",
    "Cookie: session={}": "Cookie: ***",
    "Ocp-Apim-Subscription-Key: {}": "Ocp-Apim-Subscription-Key: ***",
    "the key hf_{} is": "the key *** is",
}


@pytest.mark.parametrize("text", SAID)
def test_a_secret_in_a_text_is_not_shown_however_it_is_written(text: str) -> None:
    """The word after Bearer was, and the rest of a secret with spaces or commas."""
    secret = "Pl4nted" + "x9" * 12
    assert shown_text(text.replace("{{", "{").replace("}}", "}").replace("{}", secret)) == SAID[text]


@pytest.mark.parametrize(
    "value",
    [
        "Bearer Pl4nted0123456789",
        "hf_Pl4ntedPl4ntedPl4nted",
        "sk-Pl4ntedPl4ntedPl4nted",
        "AKIAPLANTEDPLANTED01",
    ],
)
def test_what_is_a_secret_under_any_name_is_refused_and_not_shown(value: str) -> None:
    for field in ("reward.options.header", "run.experiment", "data.sources.0.system"):
        values = json.loads(json.dumps(LEAST))
        apply(values, f"{field}={value}")
        said = everything_said(values)
        assert "must not be" in said, field
        assert value not in said
    assert not is_known_secret("Basic responsibilities of a sk-learner, Bearer of the news")


def test_long_texts_are_read_through_in_no_time() -> None:
    started = time.perf_counter()
    for part in (
        "a",
        "a.",
        "a-",
        "://",
        "token",
        "?a&",
        "s3://a:",
        "Bearer ",
        "token='",
        "token=a,",
        "sk-",
        "\\",
    ):
        shown_text(part * 20_000)
    assert time.perf_counter() - started < 5


def test_two_secrets_are_no_change_of_the_configuration() -> None:
    def config(value: Any, **more: Any) -> RunConfig:
        return RunConfig.model_validate({**LEAST, "reward": {"options": {"api_key": value, **more}}})

    same = ("one", "two", "${env:A}", "${env:B}", "${prefect:a}")
    for before in same:
        for now in same:
            assert not list(changes(config(before), config(now)))
    assert not list(changes(config("a", judge="${env:A}"), config("a", judge="${env:B}")))
    (change,) = changes(config("secret-a", n=1), config("secret-b", n=2))
    assert change.path == "reward.options"
    assert "secret" not in f"{change}"
    stored = config("old literal").model_dump(mode="json")
    assert RunConfig.model_validate(stored).reward.options == {"api_key": "old literal"}


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
    with pytest.raises(ConfigError, match="refers to JUDGE, which is not set; export JUDGE"):
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


def test_a_block_of_prefect_is_a_reference_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"key": "Bearer ${prefect:judge-2}", "other": ["${env:JUDGE}"]}
    assert list(references(options)) == ["prefect:judge-2", "env:JUDGE"]
    assert blocks(options) == {"judge-2"}
    for no_reference in (
        "${prefect:}",
        "${prefect:A}",
        "${prefect:a_b}",
        "$prefect:a",
        "${env:a-b}",
        "${other:a}",
    ):
        assert not list(references(no_reference)), no_reference
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setenv("JUDGE", "other")
    with pytest.raises(
        ConfigError, match="refers to judge-2, which is not set; save a Secret block with the name judge-2"
    ):
        resolved(options, "reward.options")
    pass_on("judge-2", SECRET)
    assert resolved(options, "reward.options") == {"key": f"Bearer {SECRET}", "other": ["other"]}
    assert SECRET in {os.environ[name] for name in variables(options)}  # which go to actors
    assert scrubbed(f"{SECRET} other", options) == "${prefect:judge-2} ${env:JUDGE}"


@pytest.mark.parametrize(
    "secret", ["S3cr3t/Planted+0123=&'\u00e4\n", "abcdefgh", "pass word-longer-than-that"]
)
def test_a_secret_is_taken_out_of_a_text_in_every_form(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", secret)
    for before in ("", "u", "us", "user:", "\u00fc:"):
        for after in ("", "x", "xy"):
            whole = (before + secret + after).encode()
            shown = [
                (before + secret + after),
                quote(whole),
                quote_plus(whole),
                json.dumps(before + secret + after),
                repr(before + secret + after),
                base64.b64encode(whole).decode(),
                base64.urlsafe_b64encode(whole).decode(),
            ]
            for text in shown:
                clean = scrubbed(f"it said {text}.", ["${env:JUDGE}"])
                assert "${env:JUDGE}" in clean, text
                assert secret[3:] not in clean
                assert len(clean) < len("it said ${env:JUDGE}.") + 24, clean
    assert scrubbed("nothing of it", ["${env:JUDGE}"]) == "nothing of it"
