"""`millrace check` of tools: each family's chat template is taken, and one whose calls cannot be read is named."""

from __future__ import annotations

import pytest

from millrace.connectors.huggingface.template import ChatTemplate
from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import SessionSection
from millrace.flows.preflight.check_model import ReadModel
from millrace.flows.preflight.check_session import check_session
from tests.support.chat_templates import SPECIAL, TEMPLATES

UNREAD = TEMPLATES["chatml"].replace("tool_call>", "call>")
REFUSED = {"deepseek": "it rewrites earlier turns"}  # which drops the thinking of each turn before the next


def problems(template: str, ends: list[str]) -> list[Problem]:
    model = ReadModel(template=ChatTemplate(template, {}), ends=ends)
    session = SessionSection.model_validate(
        {"tools": ["tests.support.session_functions:add"], "max_tokens": 100}
    )
    return list(check_session(session, model))


@pytest.mark.parametrize("family", TEMPLATES)
def test_tools_with_a_familys_template_are_taken(family: str) -> None:
    found = problems(TEMPLATES[family], SPECIAL[family])
    assert [problem.field for problem in found] == ["model.chat_template"] * (family in REFUSED)
    assert all(REFUSED[family] in problem.reason for problem in found)


def test_a_template_whose_calls_cannot_be_read_is_named() -> None:
    (problem,) = problems(UNREAD, SPECIAL["chatml"])
    assert problem.field == "model.chat_template"
    assert problem.reason == "how this model writes its calls of tools is not known"
    assert problem.remedy.startswith("give the tokenizer a response_template")
