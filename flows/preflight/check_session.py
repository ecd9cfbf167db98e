"""Check tools and the chat template for rollouts of several turns.

A dialogue grows by new tokens only. The model was trained on the same text only if its template does not change earlier turns:
checked here over a set of dialogues, or refused with the first text that differs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.connectors.huggingface.dialogue import Follows, dialogues, thinks_in_text
from millrace.connectors.huggingface.response_templates import template_for
from millrace.connectors.huggingface.suffix import Message, Render, first_difference
from millrace.connectors.user_code.mcp_tools import server_schemas
from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import McpTools, SessionSection
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.core.errors import ConfigError
from millrace.core.hooks.rollout_selection import UnknownRolloutError, rollout_function, rollout_functions
from millrace.core.sessions.tools import LoadedTool
from millrace.flows.preflight.check_data import unknown_names
from millrace.flows.preflight.check_model import ReadModel, template_problem
from millrace.flows.preflight.first_rows import CheckedRows

SHOWN = 60


def check_session(
    session: SessionSection, model: ReadModel, template_kwargs: Sequence[Mapping[str, Any]] = ({},)
) -> Iterator[Problem]:
    """Tools that cannot be described to a model, answers whose calls cannot be parsed, a template that rewrites earlier turns.

    template_kwargs: the variables of the template that each source sets.

    Notes in `model` the schemas of the tools.
    """
    for at, tool in enumerate(session.tools):
        field = f"rollout.session.tools.{at}"
        try:
            if isinstance(tool, McpTools):
                model.tools += server_schemas(tool.mcp, f"{field}.mcp")
            else:
                model.tools.append(LoadedTool(tool, field).schema)
        except ConfigError as error:
            place, value = (
                (f"{field}.mcp", tool.mcp.url or " ".join(tool.mcp.command))
                if isinstance(tool, McpTools)
                else (f"{field}.function", tool.function)
            )
            yield Problem(place, value, error.reason, error.remedy or "correct it")
    if model.template is None:
        return
    if session.tools and not any(function for _, function in rollout_functions(session)):
        yield from _reads_calls(model)
    if session.history == "exact":
        own_code = session.function or session.named or session.environment
        follow: Sequence[Follows] = ("user", "tool") if own_code and session.tools else ("user",)
        for follows in follow if own_code else ("tool",):
            yield from _leaves_history(model, follows, template_kwargs)


def check_named_rollouts(session: SessionSection, data: Sequence[CheckedRows]) -> Iterator[Problem]:
    """Rows that name no rollout."""
    for rows in data:
        unknown: list[tuple[PromptRow, str]] = []
        for row in rows.usable:
            try:
                rollout_function(session, row.metadata)
            except UnknownRolloutError as error:
                unknown.append((row, str(error)))
        yield from unknown_names(
            rows, unknown, "rollout", "correct the rows, or add the function to rollout.session.named"
        )


def _reads_calls(model: ReadModel) -> Iterator[Problem]:
    template, tools = model.template, model.tools
    assert template is not None, "it was asked for"
    asked: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    try:
        shown = template.render(asked, tools=tools) != template.render(asked)
    except ValueError:
        shown = False
    if not shown:
        yield template_problem(
            "it does not show the model any tools",
            "name a template that writes `tools`, or describe them in data.sources[].system and call them from "
            "rollout.session.function",
        )
    elif not model.reads_answers and template_for(template.text) is None:
        yield template_problem(
            "how this model writes its calls of tools is not known",
            "give the tokenizer a response_template (transformers has it), or read the calls in rollout.session.function",
        )


def _leaves_history(
    model: ReadModel, follows: Follows, template_kwargs: Sequence[Mapping[str, Any]]
) -> Iterator[Problem]:
    template = model.template
    assert template is not None, "it was asked for"

    def renderer(variables: Mapping[str, Any]) -> Render:
        def render(messages: Sequence[Message], for_answer: bool) -> str:
            given = [dict(message) for message in messages]
            return template.render(given, None, for_answer, model.tools, variables)

        return render

    try:
        differences = (
            first_difference(render, dialogues(follows, thinks_in_text(render, follows)), model.ends)
            for render in map(renderer, template_kwargs)
        )
        found = next((difference for difference in differences if difference), None)
    except ValueError as error:
        yield template_problem(
            f"it refuses a dialogue in which a message of the {follows} follows a turn: {error}",
            "name a template that takes such dialogues",
        )
        return
    if found:
        yield template_problem(
            f"it rewrites earlier turns ({found.dialogue}): where {found.grown[:SHOWN]!r} was sent it would send "
            f"{found.rendered[:SHOWN]!r} later",
            "name a template that leaves them as they were, or set rollout.session.history=append: then generated tokens still stay in the prompt",
        )
