"""Chat templates that take any time or memory: refused by name, wherever a template is rendered, and the next text is rendered."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from millrace.connectors.engines.embedded.chat import ChatRoute
from millrace.connectors.engines.embedded.sampling import RequestError
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.template import ChatTemplate
from millrace.connectors.huggingface.tiny import build_tokenizer
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.connectors.rewards.reward_model import rendered
from millrace.core.config.model import Model
from millrace.core.errors import ConfigError
from millrace.core.families.chat_templates import (
    TemplateLimitError,
    TemplateLimits,
    TemplateRefusedError,
    TemplateRenderer,
    apply_template,
)
from millrace.core.hooks.protocols import RewardInput
from tests.house.source import ROOM_FOLDERS

Messages = list[dict[str, Any]]
ASKED: Messages = [{"role": "user", "content": "1+1="}]
LOOP = "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"
TIME, MEMORY = "more than 0.2 s of processor time", "more than 128 MiB of memory"
HOSTILE = {  # what a template does: the template, and how it is refused
    "loops in loops": (LOOP, TIME),
    "a loop that a message starts": ("{% if 'go' in messages[0].content %}" + LOOP + "{% endif %}", TIME),
    "macros that call each other": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        TIME,
    ),
    "a power, which is computed when it is compiled": ("{{ 10 ** (10 ** 9) }}", TIME),
    "a power of a variable": ("{% set x = messages | length + 9 %}{{ 0 * x ** (x ** 9) }}", TIME),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "a product, which is computed when it is compiled": ("{{ 'a' * 10**10 }}", MEMORY),
    "a product of a variable": ("{{ messages[0].role * 10**10 }}", MEMORY),
    "a filter": ("{{ messages[0].role | center(10**10) }}", MEMORY),
    "a method": ("{{ messages[0].role.ljust(10**10) }}", MEMORY),
    "a text that doubles": (
        "{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        MEMORY,
    ),
    "a list": ("{% set n = namespace(t=[1]) %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}", MEMORY),
    "a long text": ("{{ messages[0].role * 10**6 }}", "it writes 4000000 characters, of messages with"),
}  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(TemplateLimits(seconds=0.2, memory_mb=128))
    yield made
    made.close()


@pytest.mark.parametrize("what", HOSTILE)
def test_a_template_that_takes_any_time_or_memory_is_refused_and_the_next_is_rendered(
    small: TemplateRenderer, what: str
) -> None:
    template, reason = HOSTILE[what]
    good = "{{ messages[0].content }}"
    variables = {"messages": [{"role": "user", "content": "go"}]}
    with pytest.raises((TemplateLimitError, TemplateRefusedError), match=re.escape(reason)):
        small.render(template, variables)
    assert small.render(good, variables) == "go"
    if "message starts" in what:
        assert small.render(template, {"messages": ASKED}) == ""


def test_names_are_read_within_the_same_limits(small: TemplateRenderer) -> None:
    assert small.variables("{{ a }}{% set b = c %}{{ b }}") == {"a", "c"}
    with pytest.raises(TemplateLimitError, match=TIME):
        small.variables("{{ 10 ** (10 ** 9) }}")


def test_messages_that_do_not_fit_into_memory_are_refused(small: TemplateRenderer) -> None:
    with pytest.raises(TemplateLimitError, match=MEMORY):
        small.render("{{ a }}", {"a": "ab" * (40 << 20)})
    assert small.render("{{ a }}", {"a": 1}) == "1"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_something_else_ends_is_started_again(small: TemplateRenderer, number: int) -> None:
    small.render("a", {})
    assert small.process
    os.kill(small.process, number)
    assert small.render("b", {}) == "b"


def test_what_is_no_data_is_refused(small: TemplateRenderer) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, lambda: None):
        with pytest.raises(TemplateRefusedError, match="messages or variables"):
            small.render("a", {"a": value})
    while deep:  # the collector's recursion is as deep
        deep = deep[0]


# what templates use of transformers' own environment: each is rendered as transformers renders it
SAME = {
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=true, sort_keys=true) }}",
    "generation": "{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\n b \n",
    "date": "{{ strftime_now('%Y') }}",
    "special": "{{ eos_token }}{{ add_generation_prompt }}{{ tools }}{{ documents }}{{ own }}",
    "surrogates": "{{ '\\ud800' }}{{ messages[1].content }}",
}


@pytest.mark.parametrize("what", SAME)
def test_a_text_is_the_one_of_transformers(what: str) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = SAME[what]
    messages: Messages = [*ASKED, {"role": "assistant", "content": "ü 日本 <b> ' \u2028 \ud800"}]
    wanted = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, own=[1, (2,)]
    )
    given = {"own": [1, (2,)]}
    assert apply_template(tokenizer, messages, for_answer=True, template_kwargs=given) == wanted


def test_a_template_of_tools_is_chosen_as_transformers_chooses_it() -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    assert apply_template(tokenizer, ASKED, for_answer=True) == "plain"
    assert apply_template(tokenizer, ASKED, for_answer=True, tools=[{"name": "add"}]) == "add"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A tokenizer whose template takes gigabytes."""
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    tokenizer.chat_template = "{{ messages[0].role * 10**10 }}"
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def _loaded(folder: str) -> PromptTokenizer:
    return PromptTokenizer.load(Model(path=folder))


def _of_file(folder: str) -> None:
    template = Path(folder, "other.jinja")
    template.write_text("{{ messages[0].role * 10**10 }}")
    _loaded_file = PromptTokenizer.load(Model(path=folder, chat_template=str(template)))
    _loaded_file.encode_prompts(["1+1="], chat=True)


def _rewarded(folder: str) -> None:
    rendered(RewardInput(prompt=ASKED, response="2"), folder)


PLACES: Mapping[str, tuple[Callable[[str], Any], type[Exception], str]] = {
    "a prompt": (
        lambda folder: _loaded(folder).encode_prompts(["1+1="], chat=True),
        ConfigError,
        "model.path = {folder}: the chat template is refused: .* memory; .*model.chat_template",
    ),
    "a file": (_of_file, ConfigError, "model.chat_template = {folder}/other.jinja: the chat template is refused: "),
    "the end of a turn": (
        lambda folder: _loaded(folder).ends,
        ConfigError,
        "model.path = {folder}: the chat template is refused: ",
    ),
    # a message may be the cause: its rollout fails, its row is set aside, and the run goes on
    "a dialogue": (
        lambda folder: Dialogues(_loaded(folder), ()).opening(ASKED, True),
        ValueError,
        "model.path = {folder}: the chat template is refused: ",
    ),
    "a check": (lambda folder: ChatTemplate("{{ 'a' * 10**10 }}", {}).render("1+1="), ValueError, "MiB of memory"),
    "a reward model": (_rewarded, ConfigError, "tokenizer = {folder}: the chat template is refused: "),
    "the embedded engine": (
        lambda folder: ChatRoute(None, folder, str)._rendered(ASKED),  # type: ignore[arg-type]  # asks no engine
        RequestError,
        "messages: the chat template of {folder} refuses: it takes more than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_renders_names_the_template(folder: str, place: str) -> None:
    act, kind, reason = PLACES[place]
    with pytest.raises(kind, match=reason.replace("{folder}", re.escape(folder))):
        act(folder)


def test_nothing_else_renders_a_template() -> None:
    root = Path(__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for room in ROOM_FOLDERS
        for path in (root / room).rglob("*.py")
        if re.search(r"apply_chat_template\(|^ *(import|from) jinja2", path.read_text(), re.MULTILINE)
    }
    assert found == {"core/families/template_process.py"}
