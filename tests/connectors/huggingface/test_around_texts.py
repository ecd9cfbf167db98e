"""What a tokenizer puts around a text, cuts off it or pads it with: no prompt ends with it, and a check counts what a run has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from millrace.connectors.engines.embedded.text import Text
from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.connectors.huggingface.template import ChatTemplate, TokenizerFolder
from millrace.connectors.huggingface.tokenizer import PromptTokenizer
from millrace.core.config.data import Source
from millrace.core.config.model import Model
from millrace.flows.preflight.check_dialogues import check_dialogues
from millrace.flows.preflight.check_model import ReadModel
from millrace.flows.preflight.check_prompts import rendered
from millrace.flows.preflight.first_rows import CheckedRows
from millrace.tasks.data.prompt_dataset import load_prompts
from tests.support.around_texts import BOS, EOS, TEMPLATE, raw_tokenizer, save_tokenizer, template

AROUND: dict[str, tuple[Any, list[int]]] = {  # a post-processor, and what stands before a text
    "nothing": (None, []),
    "bytes": (processors.ByteLevel(trim_offsets=True), []),
    "a beginning": (template(f"{BOS}:0 $A:0"), [256]),
    "an end": (template(f"$A:0 {EOS}:0"), []),
    "both": (template(f"{BOS}:0 $A:0 {EOS}:0"), [256]),
    "two ends": (template(f"{BOS}:0 $A:0 {EOS}:0 {EOS}:0"), [256]),
    "two beginnings": (template(f"<|turn|>:0 {BOS}:0 $A:0 {EOS}:0"), [258, 256]),
    "the end at both": (template(f"{EOS}:0 $A:0 {EOS}:0"), [257]),
    "another token at the end": (template(f"{BOS}:0 $A:0 <|turn|>:0"), [256]),
    "as Llama has it": (processors.Sequence([processors.ByteLevel(trim_offsets=False), template(f"{BOS}:0 $A:0 {EOS}:0")]), [256]),
    "as BERT has it": (processors.BertProcessing((EOS, 257), (BOS, 256)), [256]),
    "as RoBERTa has it": (processors.RobertaProcessing((EOS, 257), (BOS, 256)), [256]),
}  # fmt: skip
LIMITS: dict[str, Callable[[Tokenizer], None]] = {
    "padded to a length": lambda raw: raw.enable_padding(length=600, pad_id=257, pad_token=EOS),
    "padded on the left": lambda raw: raw.enable_padding(direction="left", length=64, pad_id=257, pad_token=EOS),
    "padded to the longest": lambda raw: raw.enable_padding(pad_id=257, pad_token=EOS),
    "padded to a multiple": lambda raw: raw.enable_padding(pad_to_multiple_of=8, pad_id=257, pad_token=EOS),
    "padded with a byte": lambda raw: raw.enable_padding(length=40, pad_id=0, pad_token="!"),
    "cut to a length": lambda raw: raw.enable_truncation(5),
    "cut on the left": lambda raw: raw.enable_truncation(5, direction="left"),
    "cut with a stride": lambda raw: raw.enable_truncation(9, stride=2),
    "cut by another strategy": lambda raw: raw.enable_truncation(4, strategy="only_first"),
    "cut to a long length": lambda raw: raw.enable_truncation(512),
    "cut and padded": lambda raw: (raw.enable_truncation(5), raw.enable_padding(length=8, pad_id=257, pad_token=EOS)),
}  # fmt: skip
TEXT = "What is 3+4?"
PROMPTS = [TEXT, "1+1=", "ä 日本"]
MESSAGES = [{"role": "user", "content": TEXT}]
DIALOGUE = [
    *MESSAGES,
    {"role": "assistant", "content": "7"},
    *MESSAGES,
    {"role": "assistant", "content": "It is 7."},
]


@pytest.fixture(params=[*AROUND, *LIMITS, *(f"{name}, with both around" for name in LIMITS)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[int]]:
    name, _, both = request.param.partition(", with")
    raw, before = raw_tokenizer(), list[int]()
    if name in AROUND:
        processor, before = AROUND[name]
        raw.post_processor = processor or raw.post_processor
    else:
        if both:
            raw.post_processor, before = AROUND["both"]
        LIMITS[name](raw)
    save_tokenizer(tmp_path, raw)
    return tmp_path, before


def test_texts_are_cut_the_same_everywhere(folder: tuple[Path, list[int]]) -> None:
    path, before = folder
    own = raw_tokenizer()
    tokenizer = PromptTokenizer.load(Model(path=str(path)))

    def ids(text: str) -> list[int]:
        found: list[int] = own.encode(text).ids
        return found

    # prompts and answers
    opened = [before + ids(text) for text in PROMPTS]
    assert tokenizer.encode_prompts(PROMPTS, chat=False) == opened
    asked = f"{BOS}<|turn|>user\n{TEXT}{EOS}\n<|turn|>assistant\n"
    for chat, prompt in ((True, TEXT), (True, MESSAGES), (False, MESSAGES)):
        assert tokenizer.encode_prompts([prompt], chat=chat) == [ids(asked)]  # type: ignore[list-item]
    assert tokenizer.encode_prompts([TEXT], chat=False, system="Say: ") == [before + ids(f"Say: {TEXT}")]
    assert tokenizer.encode_response("7", chat=True) == [*ids("7"), 257]
    # sessions and dialogues
    dialogues = Dialogues(tokenizer, ())
    assert dialogues.opening(MESSAGES, chat=True) == ids(asked)
    assert dialogues.opening(MESSAGES, chat=False) == before + ids(TEXT)
    said = [*ids(asked), *ids("7"), 257]
    assert dialogues.following(MESSAGES, said, chat=True) == ids(
        f"\n<|turn|>user\n{TEXT}{EOS}\n<|turn|>assistant\n"
    )
    assert dialogues.following(MESSAGES, said, chat=False) == ids(TEXT)
    trained = dialogues.trained(DIALOGUE, [1, 3])
    assert [*trained.prompt_tokens, *trained.tokens] == ids(
        tokenizer.tokenizer.apply_chat_template(DIALOGUE, tokenize=False)
    )
    # an engine that is sent text
    assert Text(path).encode(TEXT) == opened[0]


@pytest.mark.parametrize("loss_on", ["answer", "assistant"])
@pytest.mark.parametrize("chat", [True, False])
def test_a_check_counts_the_tokens_of_a_run(folder: tuple[Path, list[int]], chat: bool, loss_on: str) -> None:
    path, _ = folder
    prompts: list[Any] = [DIALOGUE, DIALOGUE[:2]] if loss_on == "assistant" else [*PROMPTS, MESSAGES]
    lines = path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"prompt": each, "label": "7"}) + "\n" for each in prompts))
    source = Source.model_validate({"name": "s", "path": str(lines), "chat": chat, "loss_on": loss_on})
    run = load_prompts(source, PromptTokenizer.load(Model(path=str(path))), 4096)
    files = TokenizerFolder(str(path))
    model = ReadModel(
        tokenizer=files.load(), template=ChatTemplate(TEMPLATE, files.special), has_template=True
    )
    model.ends = files.ends()
    rows = CheckedRows("data.sources.s", source)
    assert not rows.read()
    if loss_on == "assistant":
        assert not list(check_dialogues(rows, model))
    else:
        problems = rendered(rows, model)
        with pytest.raises(StopIteration) as ended:
            next(problems)
        rows.texts = ended.value.value
    rows.measure(model.tokenizer, 4096)
    expected = [len(each.tokens) + len(each.dialogue.tokens if each.dialogue else []) for each in run.usable]
    assert len(expected) == len(prompts)
    assert rows.lengths == expected
