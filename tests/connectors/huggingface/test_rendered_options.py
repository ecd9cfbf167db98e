"""Tools and variables reach the template wherever a prompt is rendered: in training, in a dialogue, in a check."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.template import ChatTemplate
from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config.data import Source
from millrace.core.config.evaluation import EvalSet
from millrace.core.config.model import Model
from millrace.core.contracts.rows.chat_options import ChatOptions
from millrace.tasks.data.prompt_dataset import load_prompts
from millrace.tasks.generation.sessions.session_rollout import Opening

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }},{% endfor %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if not thinking %}no thought{% endif %}{% endif %}"
)
OWN = {"type": "function", "function": {"name": "add", "parameters": {}}}
SHARED = {"type": "function", "function": {"name": "clock", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder)
    (folder / "t.jinja").write_text(TEMPLATE)
    model = Model(path=str(folder), chat_template=str(folder / "t.jinja"))
    return PromptTokenizer.load(model, [SHARED])


def test_prompts_dialogues_and_checks_render_the_same(tokenizer: PromptTokenizer) -> None:
    dialogues = Dialogues(tokenizer, [SHARED])
    template = ChatTemplate(TEMPLATE, {})
    asked = [{"role": "user", "content": "3+4="}]
    texts: list[str] = []
    for options in (
        ChatOptions(),
        ChatOptions([OWN], {"thinking": True}),
        ChatOptions([], {"thinking": True}),
    ):
        text = tokenizer.render("3+4=", chat=True, system=None, options=options)
        (ids,) = tokenizer.encode_prompts(["3+4="], chat=True, options=[options])
        assert dialogues.opening(asked, True, options) == ids
        shown = [SHARED, *options.tools]
        checked = template.render("3+4=", tools=shown, template_kwargs=options.template_kwargs)
        assert checked == text
        texts.append(text)
        added = dialogues.decode(dialogues.following(asked, ids, True, options))
        assert added.endswith("<assistant>" if options.template_kwargs else "<assistant>no thought")
    assert texts == [
        "clock,<user>3+4=<assistant>no thought",
        "clock,add,<user>3+4=<assistant>",
        "clock,<user>3+4=<assistant>",
    ]


@pytest.mark.parametrize("held_out", [False, True])
def test_the_rows_of_sources_and_sets_are_rendered_with_their_own(
    tmp_path: Path, tokenizer: PromptTokenizer, held_out: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "1+1=", "label": "2"}\n'
        '{"prompt": "3+4=", "label": "7", "own": {"thinking": false}, '
        '"tools": [{"type": "function", "function": {"name": "add"}}]}\n'
    )
    values = {"name": "s", "path": str(path), "tools_key": "tools", "chat_template_kwargs_key": "own"}
    source = (EvalSet if held_out else Source).model_validate(
        {**values, "chat_template_kwargs": {"thinking": True}}
    )
    found = load_prompts(source, tokenizer, 100)
    decode = tokenizer.tokenizer.decode
    assert [decode(prompt.tokens) for prompt in found.usable] == [
        "clock,<user>1+1=<assistant>",
        "clock,add,<user>3+4=<assistant>no thought",
    ]


def test_the_variables_that_a_template_reads_are_known() -> None:
    assert "thinking" in ChatTemplate(TEMPLATE, {}).variables
    assert "message" not in ChatTemplate(TEMPLATE, {}).variables


def test_a_rollout_has_the_options_of_its_row() -> None:
    source = Source(path="rows.jsonl", tools_key="tools", chat_template_kwargs={"thinking": True})
    opening = Opening("r", "g", [], [], seed=0, chat=True, longest=9, columns=source)
    assert opening.options == ChatOptions()
    assert opening.of_row({"tools": [OWN]}, 16).options == ChatOptions([OWN], {"thinking": True})
    assert opening.of_row({}, 16).options == ChatOptions((), {"thinking": True})
