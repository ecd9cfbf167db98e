"""`millrace check` shows what is sent for rows in the forms that public data has, and names what cannot be sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer
from typer.testing import CliRunner

from millrace.connectors.huggingface.tiny import build_tiny_model
from millrace.flows.commands import app
from tests.support.around_texts import BOS, EOS, raw_tokenizer, save_tokenizer, template

CHATML = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# shows tools and calls; a content that is no text is left out
STRICT = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# trims, takes one call a message, and looks only whether the key is there
ONE_CALL = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{{ m.tool_calls[0].function | tojson }}{% else %}"
    "{{ m.content | trim }}{% endif %}<|eos|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "run": {"name": "texts", "iterations": 1},
    "data": {"max_prompt_tokens": 512},
    "storage": {"root": "runs"},
    "rollout": {"prompts": 4, "samples_per_prompt": 2, "sampling": {"max_new_tokens": 4}},
    "trainer": {"global_batch": 8, "max_pack_tokens": 4096, "threads": 1},
    "engines": {"threads": 1},
}
SUPERVISED = {"rollout": {"prompts": 8, "samples_per_prompt": 1}, "algorithm": {"loss": "sft", "aggregation": "token_mean"}}  # fmt: skip
Make = Callable[[int], dict[str, Any]]


def padded(raw: Tokenizer) -> None:
    raw.enable_padding(length=600, pad_id=257, pad_token=EOS)


def adding_an_end(raw: Tokenizer) -> None:
    raw.post_processor = template(f"{BOS}:0 $A:0 {EOS}:0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    weights = build_tiny_model(folder / "weights", vocab_size=264)
    for name, chat_template, change in (
        ("chatml", CHATML, None),
        ("strict", STRICT, None),
        ("one_call", ONE_CALL, None),
        ("adds_eos", CHATML, adding_an_end),
        ("padded", CHATML, padded),
    ):
        model, raw = folder / name, raw_tokenizer()
        model.mkdir()
        for file in ("config.json", "model.safetensors"):
            (model / file).symlink_to(weights / file)
        if change:
            change(raw)
        save_tokenizer(model, raw, chat_template)
    return folder


def checked(
    place: Path, model: str, rows: Sequence[dict[str, Any]], source: dict[str, Any], table: bool = False, **changes: Any
) -> str:  # fmt: skip
    """What check prints for a source with these rows."""
    path = place / ("rows.parquet" if table else "rows.jsonl")
    if table:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {**CONFIG, **changes, "model": {"path": str(place / model)}}
    config["data"] = {
        **CONFIG["data"],
        **changes.get("data", {}),
        "sources": [{"name": "s", "path": str(path), **source}],
    }
    config["storage"] = {"root": str(place / "runs")}
    (place / "run.yaml").write_text(yaml.safe_dump(config))
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", str(place / "run.yaml")]).output


def shown(output: str) -> str:
    """The text that is sent, as the plan shows it."""
    lines = output.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith(("a prompt", "a dialogue"))), None)
    assert first is not None, output
    text = lines[first + 1 :]
    end = next(at for at, line in enumerate(text) if not line.startswith(" "))
    indent = min(len(line) - len(line.lstrip()) for line in text[:end] if line.strip())
    return "\n".join(line[indent:] for line in text[:end])


def made(make: Make) -> list[dict[str, Any]]:
    return [make(number) for number in range(8)]


def parts(number: int) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is "}, {"type": "text", "text": f"{number}+1?"}]
    return {"prompt": [{"role": "user", "content": content}], "label": str(number + 1)}


def picture(number: int) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    content = [image, {"type": "text", "text": f"What is {number}?"}]
    return {"prompt": [{"role": "user", "content": content}], "label": str(number)}


def calls(number: int) -> dict[str, Any]:
    name, arguments, answer = (
        ("add", {"a": number, "b": 2}, "2") if number % 2 else ("weather", {"city": "Oslo"}, "rain")
    )
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": f"{name}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
    }


def no_calls(number: int) -> dict[str, Any]:
    said = {"role": "assistant", "content": "hello", "tool_calls": []}
    return {
        "prompt": [{"role": "user", "content": "hi"}, said, {"role": "user", "content": f"{number}?"}],
        "label": "x",
    }


def json_text(number: int) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {number}+1?"},
    ]
    return {"prompt": json.dumps(messages), "label": str(number + 1)}


def null_default(number: int) -> dict[str, Any]:
    properties = {"limit": {"type": ["integer", "null"], "default": None}}
    function = {
        "name": "find",
        "description": "Find.",
        "parameters": {"type": "object", "properties": properties},
    }
    return {"prompt": f"{number}?", "label": "x", "tools": [{"type": "function", "function": function}]}


def plain(number: int) -> dict[str, Any]:
    return {"prompt": f"What is {number}+1?", "label": str(number + 1)}


ASKED = "<|turn|>user\nWhat is 0+1?<|eos|>\n<|turn|>assistant"


@pytest.mark.parametrize("model", ["chatml", "strict", "one_call"])
def test_parts_are_sent_as_their_text(place: Path, model: str) -> None:
    text = ASKED if model != "one_call" else ASKED.replace("<|eos|>\n", "<|eos|>")
    assert shown(checked(place, model, made(parts), {})) == text
    assert shown(checked(place, model, made(parts), {}, table=True)) == text


def test_a_picture_is_named_as_the_reason(place: Path) -> None:
    said = " ".join(checked(place, "strict", made(picture), {}).split())
    assert (
        "none of its first 8 rows can be used; 8 times not text: message 0: part 0 is of type image_url"
        in said
    )
    assert "; leave these parts out, or write as text what they show" in said
    mixed = [*made(parts)[:7], picture(7)]
    said = " ".join(checked(place, "strict", mixed, {}, data={"max_quarantined_share": 0.5}).split())
    assert "1 unusable, the first is row 7 (from 0): not text: message 0: part 0 is of type image_url" in said


def test_a_table_adds_no_arguments_to_calls(place: Path) -> None:
    source = {"prompt_key": "messages", "loss_on": "assistant"}
    lines = shown(checked(place, "strict", made(calls), source, **SUPERVISED))
    assert '⟦<call>weather {"city": "Oslo"}</call><|eos|>⟧' in lines
    assert shown(checked(place, "strict", made(calls), source, table=True, **SUPERVISED)) == lines


def test_no_calls_are_no_calls(place: Path) -> None:
    assert "hello<|eos|><|turn|>user\n0?<|eos|>" in shown(checked(place, "one_call", made(no_calls), {}))


def test_messages_that_are_json_text_are_messages(place: Path) -> None:
    text = shown(checked(place, "chatml", made(json_text), {}))
    assert text == f"<|turn|>system\nBe brief.<|eos|>\n{ASKED}"
    assert '"role": "system"' in shown(checked(place, "chatml", made(json_text), {"chat": False}))
    python = [{**row, "prompt": str(json.loads(row["prompt"]))} for row in made(json_text)]
    said = " ".join(checked(place, "chatml", python, {}).split())
    assert "it starts as a list of messages does, and is not JSON" in said


def test_a_null_that_was_written_is_shown(place: Path) -> None:
    assert '"default": null' in shown(checked(place, "strict", made(null_default), {"tools_key": "tools"}))


def test_an_end_that_the_tokenizer_adds_and_its_padding_do_not_count(place: Path) -> None:
    assert "row 0 of s, 13 tokens" in checked(place, "adds_eos", made(plain), {"chat": False})
    assert "row 0 of s, 31 tokens" in checked(place, "padded", made(plain), {})
