"""Check that the chat template turns each prompt into a text that contains it and is ready for an answer."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from millrace.connectors.huggingface.template import ChatTemplate, last_text
from millrace.core.config.parts.problems import Problem
from millrace.core.contracts.images import image_names
from millrace.core.contracts.rows.chat_options import RESERVED, chat_options
from millrace.core.contracts.rows.prompts import Prompt, PromptRow
from millrace.flows.preflight.check_model import ReadModel, hidden_tools, template_problem
from millrace.flows.preflight.first_rows import CheckedRows

ROWS, TEXT = 2_000, 1 << 19  # rows that are rendered, and about the characters in them
COMPARED = 8  # rows whose text is compared with their prompt
ANSWER = "An answer."
SHOWN = 40


def rendered(rows: CheckedRows, model: ReadModel) -> Generator[Problem, None, list[str]]:
    """Yields problems of the template; returns the texts of the first rows."""
    source, field = rows.source, rows.field
    chosen = _first(rows.usable)
    plain = [isinstance(row.prompt, str) and not source.chat for row in chosen]
    if not all(plain) and not model.has_template and model.shape:
        yield template_problem(
            f"the tokenizer has no chat template, which the prompts of {field} need",
            f"name a file with one, or set {field}.chat=false if they are plain text",
        )
    if not all(plain) and model.template is None:
        return []
    texts: list[str] = []
    for row, is_plain in zip(chosen, plain, strict=True):
        if is_plain or model.template is None:
            texts.append((source.system or "") + str(row.prompt))
            continue
        try:
            options = chat_options(source, row.metadata)
            text = model.template.render(
                row.prompt,
                source.system,
                tools=[*model.tools, *options.tools],
                template_kwargs=options.template_kwargs,
            )
        except ValueError as error:
            yield _refused(rows, model.template, row, error)
            return []
        if len(texts) < COMPARED and last_text(row.prompt) not in text:
            yield template_problem(
                f"it leaves out the prompt: {last_text(row.prompt)[:SHOWN]!r} of {field} is not in the text it makes",
                "have it write message['content'] of every message",
            )
            return []
        pictures = len(image_names(row.prompt))
        if rows.mark and text.count(rows.mark) != pictures:
            yield template_problem(
                f"it writes {text.count(rows.mark)} times {rows.mark} for row {row.row} of {field}, which has {pictures} pictures",
                f"have it write {rows.mark} for each part of message['content'] whose type is image",
            )
            return []
        texts.append(text)
    if model.template is not None and not plain[0]:
        options = chat_options(source, chosen[0].metadata)
        yield from _ready(model.template, chosen[0].prompt, options.template_kwargs)
        yield from _unread(rows, model.template, chosen)
    return texts


def _unread(rows: CheckedRows, template: ChatTemplate, chosen: Sequence[PromptRow]) -> Iterator[Problem]:
    """Variables and tools that the template does not use."""
    source = rows.source
    for name in source.chat_template_kwargs:
        if name not in template.variables:
            read = ", ".join(sorted(template.variables - RESERVED)) or "none"
            yield Problem(
                f"{rows.field}.chat_template_kwargs",
                name,
                f"the chat template reads no variable of this name; those it reads: {read}",
                "correct the name or remove it",
            )
    if "tools" not in template.variables and any(chat_options(source, row.metadata).tools for row in chosen):
        yield hidden_tools(rows.field)


def _first(usable: Sequence[PromptRow]) -> list[PromptRow]:
    """The first rows, up to a bound of rows and text."""
    chosen: list[PromptRow] = []
    length = 0
    for row in usable[:ROWS]:
        chosen.append(row)
        length += len(str(row.prompt))
        if length > TEXT:
            break
    return chosen


def _ready(template: ChatTemplate, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem if the template writes text before an answer that it does not write after a prompt."""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    if messages[-1].get("role") == "assistant":
        return
    try:
        sent, without = (
            template.render(messages, None, for_answer=ready, template_kwargs=template_kwargs)
            for ready in (True, False)
        )
        answered = template.render(
            [*messages, {"role": "assistant", "content": ANSWER}],
            None,
            for_answer=False,
            template_kwargs=template_kwargs,
        )
    except ValueError:
        # the template takes no answers, or has refused the prompt already
        return
    before, found, _ = answered.removeprefix(sent).partition(ANSWER)
    if sent == without and answered.startswith(sent) and found and before.strip():
        yield template_problem(
            f"it has no generation prompt: the sent text ends in {sent[-SHOWN:]!r}, and an answer starts after {before!r}",
            "end it with {% if add_generation_prompt %}" + before + "{% endif %}",
        )


def _refused(rows: CheckedRows, template: ChatTemplate, row: PromptRow, error: ValueError) -> Problem:
    system = rows.source.system
    if system:
        try:
            options = chat_options(rows.source, row.metadata)
            template.render(row.prompt, None, tools=options.tools, template_kwargs=options.template_kwargs)
        except ValueError:
            pass
        else:
            return Problem(
                f"{rows.field}.system",
                system,
                f"the chat template accepts no system message: {error}",
                "remove it, or put it into the prompts",
            )
    return template_problem(
        f"it fails on the prompts of {rows.field}, first on row {row.row}: {error}",
        "correct the template, or name another file",
    )
