"""How answers end: checks for stop texts that no answer has, and a line of the plan if the model's files lack an end token.

Reads only files, without transformers. connectors/huggingface/answer_ends.py decides the tokens of a request.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.connectors.huggingface.answer_ends import REMEDY, AnswerEnds, unseen
from millrace.connectors.huggingface.suffix import turn_end
from millrace.core.config import RunConfig
from millrace.core.config.parts.problems import Problem
from millrace.core.families.tokenizer_file import engine_ends
from millrace.flows.preflight.check_model import ReadModel, special_tokens


def check_stops(config: RunConfig, found: ReadModel) -> Iterator[Problem]:
    """A problem for each text to stop at that holds a special token and more, or half a character."""
    special = special_tokens(found.tokenizer)
    places = {
        "rollout.sampling.stop": config.rollout.sampling,
        **{
            f"evaluation.sets.{at}.sampling.stop": each.sampling
            for at, each in enumerate(config.evaluation.sets)
        },
    }
    for field, sampling in places.items():
        for text in sampling.stop:
            if problem := unseen(text, special if sampling.skip_special_tokens else {}):
                yield Problem(field, text, problem, REMEDY)


def answer_ends(config: RunConfig, found: ReadModel) -> AnswerEnds | None:
    """The tokens that end the run's answers; None if the tokenizer's files are of a kind that is not read here."""
    special, template = special_tokens(found.tokenizer), found.template
    if not special:
        return None
    turn = None
    if template is not None:
        turn = turn_end(
            lambda messages, for_answer: template.render(list(messages), None, for_answer), found.ends
        )
    return AnswerEnds(
        engine=tuple(engine_ends((found.here or config).model.path)),
        turn=special.get(turn or ""),
        eos=special.get(found.ends[0]) if found.ends else None,
        special=special,
    )


def ends_text(config: RunConfig, found: ReadModel) -> str | None:
    """The plan's text if the model's files do not name every token that ends an answer."""
    ends = answer_ends(config, found)
    if ends is None or not ends.added:
        return None
    texts = {number: text for text, number in ends.special.items()}

    def shown(tokens: list[int]) -> str:
        return " and ".join(f"{texts.get(token, 'a token without text')} ({token})" for token in tokens)

    named = shown(list(ends.engine)) if ends.engine else "none"
    why = (
        "ends a turn of the chat template"
        if ends.turn in ends.added
        else "is the tokenizer's end of sequence"
    )
    return (
        f"at {shown(ends.added)}, which {why}. Of tokens that end an answer, generation_config.json and config.json name {named}: "
        "requests to engines name the others, and so does the generation_config.json of each export"
    )
