"""Where answers end: the token of the template, of the tokenizer and of a model's files, and what requests and exports name.

Once a model whose files named another token than its template answered to its last token, and was trained on what it said after.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.connectors.engines.embedded.text import Text
from millrace.connectors.huggingface.answer_ends import AnswerEnds
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config import RunConfig
from millrace.core.config.model import Model
from millrace.core.errors import EngineError
from millrace.core.families.tokenizer_file import engine_ends, name_ends
from millrace.flows.preflight.check_model import ReadModel, answer_ends, check_model
from tests.support.chat_templates import tokenizer_of

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass(frozen=True)
class Case:
    """A model's files, by the texts of their tokens; and what its answers end with beyond what its files name."""

    family: str
    config: list[str] | str | None
    generation: list[str] | str | None
    added: list[str]
    chat: str | None  # what ends a reference answer to a chat prompt
    eos: str | None = None  # another end of sequence of the tokenizer
    template: str | None = None


CASES = {
    "all agree": Case("chatml", "<|im_end|>", "<|im_end|>", [], "<|im_end|>"),
    "files name another": Case("chatml", "<|endoftext|>", "<|endoftext|>", ["<|im_end|>"], "<|im_end|>"),
    "generation config alone": Case("chatml", "<|endoftext|>", "<|im_end|>", [], "<|im_end|>"),
    "config alone, another": Case("chatml", "<|endoftext|>", None, ["<|im_end|>"], "<|im_end|>"),
    "no file names one": Case("chatml", None, None, ["<|im_end|>"], "<|im_end|>"),
    "several, one of them": Case("qwen3", "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], [], "<|im_end|>"),
    "a base model": Case(
        "chatml", "<|endoftext|>", "<|endoftext|>", ["<|im_end|>"], "<|im_end|>", eos="<|endoftext|>"
    ),
    "a base model without a generation config": Case(
        "chatml", None, None, ["<|im_end|>", "<|endoftext|>"], "<|im_end|>", eos="<|endoftext|>"
    ),
    "a base model without a template": Case(
        "chatml", "<|endoftext|>", None, [], "<|endoftext|>", eos="<|endoftext|>", template=""
    ),
    "a template without an end": Case(
        "chatml", "<|im_end|>", None, ["<|endoftext|>"], "<|endoftext|>", eos="<|endoftext|>", template=PLAIN
    ),
    "llama with three": Case("llama3", "<|eot_id|>", ["<|eom_id|>", "<|eot_id|>"], [], "<|eot_id|>"),
    "llama as its base": Case("llama3", "<|eom_id|>", None, ["<|eot_id|>"], "<|eot_id|>"),
    "the next message ends a turn": Case("glm4", "<|endoftext|>", None, ["<|user|>"], "<|user|>"),
    "deepseek": Case("deepseek", "<｜end▁of▁sentence｜>", None, [], "<｜end▁of▁sentence｜>"),
    "a template that refuses": Case(
        "chatml", "<|im_end|>", None, [], "<|im_end|>", template="{{ raise_exception('no') }}"
    ),
}


@cache
def tokenizer(family: str) -> Any:
    return tokenizer_of(family)


def model_of(case: Case, folder: Path) -> PromptTokenizer:
    made = tokenizer(case.family)
    made.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text())
    if case.eos:
        values["eos_token"] = case.eos
    path.write_text(json.dumps(values))
    if case.template is not None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        values.pop("chat_template", None)
        path.write_text(json.dumps(values))
        if case.template:
            (folder / "chat_template.jinja").write_text(case.template)

    def ids(texts: list[str] | str) -> list[int] | int:
        if isinstance(texts, str):
            return int(made.convert_tokens_to_ids(texts))
        return [int(made.convert_tokens_to_ids(text)) for text in texts]

    for name, texts in (("config.json", case.config), ("generation_config.json", case.generation)):
        if name == "config.json" or texts is not None:
            content = {"model_type": "qwen3"} | ({} if texts is None else {"eos_token_id": ids(texts)})
            (folder / name).write_text(json.dumps(content))
    return PromptTokenizer.load(Model(path=str(folder)))


def shown(made: PromptTokenizer, ids: list[int]) -> list[str]:
    found: list[str] = made.tokenizer.convert_ids_to_tokens(ids)
    return found


@pytest.mark.parametrize("name", CASES)
def test_requests_and_exports_name_what_a_models_files_do_not(
    name: str, tmp_path: Path, make_config: Any
) -> None:
    case = CASES[name]
    made = model_of(case, tmp_path)
    assert shown(made, made.ends.added) == case.added
    end = made.ends.trained(chat=True)
    assert end is not None
    assert shown(made, [end]) == [case.chat]
    assert made.encode_response("2", chat=True)[-1] == end
    assert made.encode_response("2", chat=False)[-1] == made.tokenizer.eos_token_id
    stops = {*made.ends.engine, *made.ends.added}
    assert {end, made.tokenizer.eos_token_id} <= stops  # an engine stops at what was trained

    found = ReadModel()
    config: RunConfig = make_config(model={"path": str(tmp_path)})
    list(check_model(config, False, found))
    assert answer_ends(config, found) == made.ends  # what check says is what a run does

    name_ends(tmp_path, made.ends.added)
    assert set(engine_ends(tmp_path)) == stops
    assert Text(tmp_path).eos == stops
    assert (
        PromptTokenizer.load(Model(path=str(tmp_path))).ends.added == []
    )  # of a run that starts from the export


def test_an_export_keeps_what_its_generation_config_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": None})
    )
    name_ends(tmp_path, [1])
    assert not (tmp_path / "generation_config.json").exists()
    name_ends(tmp_path, [3])
    made = json.loads((tmp_path / "generation_config.json").read_text())
    assert made == {"eos_token_id": [1, 3], "bos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4], "top_p": 0.5}))
    name_ends(tmp_path, [3])
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "eos_token_id": [4, 3],
        "top_p": 0.5,
    }


ENDS = AnswerEnds(engine=(258,), turn=257, eos=257, special={"<|im_end|>": 257, "<|x|>": 300})
GIVEN = {"stop": ["x"], "stop_token_ids": [2]}
STOPS: dict[str, tuple[list[str] | None, list[int] | None, list[str] | None, list[int]]] = {
    "nothing": (None, None, None, [257]),
    "empty": ([], [], None, [257]),
    "text": (["."], None, ["."], [257]),
    "the end as text": (["<|im_end|>"], None, None, [257]),
    "another special token": (["<|x|>"], None, None, [300, 257]),
    "both": (["a", "<|x|>", "b"], [5], ["a", "b"], [5, 300, 257]),
    "ids": (None, [257, 5], None, [257, 5]),
    "what engines stop at already": (None, [258], None, [258, 257]),
    "a part of a special token": (["<|im_"], None, ["<|im_"], [257]),
    "twice": (["<|x|>", "<|x|>"], [300], None, [300, 257]),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_text_that_is_a_special_token_is_its_id_in_every_request(name: str) -> None:
    texts, ids, left, every = STOPS[name]
    assert ENDS.stops({"stop": texts, "stop_token_ids": ids}) == {"stop": left, "stop_token_ids": every}


@pytest.mark.parametrize(
    "text",
    ["x<|im_end|>", "<|im_end|>\n", "<|im_end|><|x|>", "\n<|x|>", "half \ud83d", "\udcff", "é\ud800"],
)
def test_a_text_that_no_answer_has_is_refused_with_the_way_to_do_it(text: str) -> None:
    with pytest.raises(EngineError, match=r"special token|half a character"):
        ENDS.stops({"stop": [text]})


@given(st.lists(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.none() | st.integers(0, 9))
def test_whatever_is_named_an_engine_stops_at_every_end_and_at_each_once(
    ids: list[int], engine: set[int], turn: int | None
) -> None:
    ends = AnswerEnds(engine=tuple(engine), turn=turn, eos=3)
    made = ends.stops({"stop_token_ids": ids})["stop_token_ids"] or []
    assert len(made) == len(set(made))
    assert {*ids, 3, *([] if turn is None else [turn])} <= {*made, *engine}


def test_without_anything_to_add_a_request_stays_as_it_was() -> None:
    assert AnswerEnds().stops({}) == {"stop": None, "stop_token_ids": None}
    assert AnswerEnds(engine=(1,), turn=1, eos=1).stops(GIVEN) == GIVEN


def test_a_sampling_that_ignores_the_end_gets_none_and_text_with_special_tokens_may_be_looked_for() -> None:
    assert ENDS.stops({"stop": ["<|x|>"], "ignore_eos": True}) == {"stop": None, "stop_token_ids": [300]}
    made = ENDS.stops({"stop": ["a<|x|>"], "skip_special_tokens": False})
    assert made == {"stop": ["a<|x|>"], "stop_token_ids": [257]}
