"""Check whole dialogues that are trained: which tokens have a loss, under the model's template.

Imports no torch and no transformers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from millrace.connectors.huggingface.suffix import Message
from millrace.connectors.huggingface.trained_turns import TextSpan, pieces
from millrace.core.config.parts.problems import Problem
from millrace.core.contracts.rows.chat_options import chat_options
from millrace.core.contracts.rows.messages import for_template, trained_messages, with_system
from millrace.core.contracts.rows.prompts import PromptRow, Quarantined, refuse
from millrace.flows.preflight.check_model import ReadModel, hidden_tools, template_problem
from millrace.flows.preflight.first_rows import CheckedRows

ROWS = 500  # number of rendered dialogues; each is rendered twice for each turn


def check_dialogues(rows: CheckedRows, model: ReadModel) -> Iterator[Problem]:
    """Problems of the first dialogues; fills the rows' pieces and texts. A dialogue that cannot be trained is a refused row."""
    if model.template is None:
        if not model.has_template and model.shape:
            yield template_problem(
                f"the tokenizer has no chat template, which the dialogues of {rows.field} need",
                "name a file with one",
            )
        return
    refused: list[Quarantined] = []
    for row in rows.usable[:ROWS]:
        try:
            rows.pieces[row.row] = _pieces(rows, row, model)
        except ValueError as error:
            refused.append(refuse(rows.source, row.row, str(error), str(row.prompt)))
    rows.refused += refused
    gone = {item.row for item in refused}
    rows.usable = [row for row in rows.usable if row.row not in gone]
    if not rows.usable:
        yield template_problem(
            f"none of the first {len(refused)} dialogues of {rows.origin} can be trained; row {refused[0].row}: "
            f"{refused[0].reason}",
            f"name another template, or set {rows.field}.loss_on to last_assistant",
        )
        return
    rows.texts = ["".join(piece.text for piece in cut) for cut in rows.pieces.values()]
    if "tools" not in model.template.variables and any(
        chat_options(rows.source, row.metadata).tools for row in rows.usable[:ROWS]
    ):
        yield hidden_tools(rows.field)


def trained_tokens(cut: Sequence[TextSpan], tokenizer: Any) -> int:
    """Number of a dialogue's tokens with a loss."""
    return sum(
        len(tokenizer.encode(piece.text, add_special_tokens=False).ids) for piece in cut if piece.trained
    )


def _pieces(rows: CheckedRows, row: PromptRow, model: ReadModel) -> list[TextSpan]:
    source, template = rows.source, model.template
    assert template is not None, "it was asked for"
    assert not isinstance(row.prompt, str), "rows without messages are refused where they are read"
    options = chat_options(source, row.metadata)

    def render(messages: Sequence[Message], for_answer: bool) -> str:
        given = [dict(message) for message in messages]
        return template.render(
            given, None, for_answer, [*model.tools, *options.tools], options.template_kwargs
        )

    messages = with_system(row.prompt, source.system)
    numbers = trained_messages(messages, source.loss_on)
    return pieces(render, for_template(messages), numbers, model.ends)
