"""Turns a row of a data source into a prompt, or says why it is unusable; fingerprints of sources. Pure.

Owns what a usable row is; knows nothing of files, tokenizers or which rows are drawn.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from pydantic import BaseModel, SerializerFunctionWrapHandler, model_serializer

from millrace.core.contracts.ids import prompt_id
from millrace.core.contracts.images import Given, RowImages, given_images, text_alone
from millrace.core.contracts.images import named as with_names
from millrace.core.contracts.rows.chat_options import (
    SAMPLING,
    TEMPLATE_KWARGS,
    TOOLS,
    row_sampling,
    row_template_kwargs,
    row_tools,
)
from millrace.core.contracts.rows.messages import (
    ROLES,
    SWITCHES,
    LossOn,
    NotJsonError,
    NotTextError,
    from_sharegpt,
    from_text,
    message_of,
    trained_messages,
    with_read_arguments,
)
from millrace.core.plain_text import json_text, whole

EXCERPT = 80
# the longest token of a vocabulary has fewer characters
CHARACTERS_A_TOKEN = 256
ALWAYS_TOKENISED = 1 << 20  # characters
_ABSENT = object()
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True)


class Keys(Protocol):
    """Which columns of a source hold what."""

    @property
    def name(self) -> str: ...
    @property
    def prompt_key(self) -> str: ...
    @property
    def label_key(self) -> str | None: ...
    @property
    def chat(self) -> bool: ...
    @property
    def metadata_key(self) -> str | None: ...
    @property
    def extra_keys(self) -> Sequence[str]: ...
    @property
    def tools_key(self) -> str | None: ...
    @property
    def chat_template_kwargs_key(self) -> str | None: ...
    @property
    def sampling_key(self) -> str | None: ...
    @property
    def label_from_prompt(self) -> bool: ...
    @property
    def loss_on(self) -> LossOn: ...
    @property
    def images_key(self) -> str | None: ...


Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """A usable prompt: text or chat messages, with what the reward needs. All of it but `images` can be stored as JSON.

    images: as the row gives them, in the prompt's order. The prompt has their numbers until they are read, then their names.
    """

    source: str
    row: int
    prompt_id: str
    prompt: Prompt
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple[Given, ...] = ()

    def with_images(self, names: Sequence[str]) -> PromptRow:
        """The row with the names of its pictures, on which its id depends, and without what they were read from."""
        assert isinstance(self.prompt, list), "a text has no pictures"
        prompt = with_names(self.prompt, names)
        found = prompt_id(self.source, self.row, _encoder.encode(prompt))
        return replace(self, prompt=prompt, prompt_id=found, images=())


@dataclass(frozen=True)
class Quarantined:
    """An unusable row, and why: `kind of reason: details`."""

    source: str
    row: int
    reason: str
    excerpt: str


class SourceFingerprint(BaseModel):
    """Fingerprint of a source's content, to notice changes during a run."""

    path: str
    size: int
    sha256: str
    rows: int
    usable: int
    usable_sha256: (
        str  # hash of the usable rows' prompt ids, in order; of the first rows of a streamed source
    )
    files: dict[str, str] = {}  # hash by name; not stored if the path names one file
    levels: dict[int, int] = {}  # rows by level; not stored for a source without levels
    streamed: bool = False  # whether rows are read when they are drawn, so that `usable` counts all of them

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in values.items()
            if value or name not in ("files", "levels", "streamed")
        }

    @classmethod
    def of(
        cls,
        path: str,
        size: int,
        sha256: str,
        rows: int,
        usable: Iterable[PromptRow],
        files: Mapping[str, str] | None = None,
    ) -> SourceFingerprint:
        """The fingerprint of a source of `rows` rows, of which `usable` are the usable ones."""
        hashed, count = hashlib.sha256(), 0
        for row in usable:
            hashed.update(row.prompt_id.encode())
            count += 1
        return cls(
            path=path,
            size=size,
            sha256=sha256,
            rows=rows,
            usable=count,
            usable_sha256=hashed.hexdigest(),
            files=dict(files or {}),
        )


def source_changes(
    before: Mapping[str, SourceFingerprint], now: Mapping[str, SourceFingerprint]
) -> list[str]:
    """What changed in the sources of a run, one line each; a changed path alone is no change."""
    lines = [f"source {name}: was not there before" for name in sorted(now.keys() - before.keys())]
    lines += [f"source {name}: is no longer there" for name in sorted(before.keys() - now.keys())]
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        if old.usable_sha256 == new.usable_sha256 and old.sha256 == new.sha256:
            continue
        same = "the file is the same, what makes a row usable changed"
        what = same if old.sha256 == new.sha256 else f"{old.size} -> {new.size} bytes"
        lines.append(
            f"source {name} ({new.path}): {what}, {old.rows} -> {new.rows} rows, "
            f"{old.usable} -> {new.usable} of them usable{_files_changed(old.files, new.files)}"
        )
    return lines


def _files_changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first changed files of a source with several files."""
    if not before or not now:
        return ""
    changed = [f"new file {name}" for name in now if name not in before]
    changed += [f"{name} is no longer there" for name in before if name not in now]
    changed += [f"{name} changed" for name in now if before.get(name, now[name]) != now[name]]
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f": {', '.join(changed[:3])}{more}" if changed else ""


def parse_line(line: bytes, row: int, keys: Keys) -> PromptRow | Quarantined:
    """Parse a line of JSONL as a prompt."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return refuse(keys, row, f"not UTF-8: byte {error.start}", repr(line[:EXCERPT]))
    if "\0" in text:  # no JSON has it
        return refuse(keys, row, "not UTF-8: zero bytes, as UTF-16 has", repr(line[:EXCERPT]))
    text = text.removeprefix("\ufeff") if row == 0 else text
    if not text.strip():
        return refuse(keys, row, "empty line", "")
    twice: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        # the row's own repeated keys come last
        twice[:] = _repeated(pairs) if len(values) < len(pairs) else []
        return values

    try:
        values = json.loads(text, parse_constant=_not_json, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        return refuse(keys, row, f"not JSON: {error}", text)
    if not isinstance(values, Mapping):
        return refuse(keys, row, f"not an object: {type(values).__name__}", text)
    if read := sorted(set(twice) & {column_of(key, values) for key in _keys(keys)}):
        return refuse(keys, row, f"two values: the key {read[0]} stands twice", text)
    return parse_row(values, row, keys)


def _repeated(pairs: Iterable[tuple[str, Any]]) -> list[str]:
    counts = Counter(name for name, _ in pairs)
    return [name for name, count in counts.items() if count > 1]


def _keys(keys: Keys) -> list[str]:
    """The keys of a row that are read."""
    own = (
        *(keys.tools_key, keys.chat_template_kwargs_key, keys.sampling_key, keys.images_key),
        *keys.extra_keys,
    )
    return [key for key in (keys.prompt_key, keys.label_key, keys.metadata_key, *own) if key]


def parse_row(values: Mapping[str, Any], row: int, keys: Keys) -> PromptRow | Quarantined:
    """Read a mapping of columns as a prompt."""
    given = value_at(values, keys.prompt_key, _ABSENT)
    if given is _ABSENT:
        return refuse(keys, row, f"missing key: {keys.prompt_key}", _shown(values, keys))
    trained, images = keys.loss_on != "answer", None
    try:
        if keys.images_key:
            images = RowImages(given_images(value_at(values, keys.images_key)))
        prompt, problem = _prompt(given, keys, images), None
        if trained:
            _check_trainable(prompt, keys.loss_on)
        if images:
            images.check_all_taken()
    except ValueError as error:
        prompt, problem = "", str(error)
    label = value_at(values, keys.label_key) if keys.label_key and not trained else None
    if keys.label_from_prompt and not problem:
        prompt, label = _without_answer(prompt)
        problem = None if prompt else "empty prompt: the answer is its only message"
    metadata, wrong = _metadata(value_at(values, keys.metadata_key) if keys.metadata_key else None)
    extra = {key: value_at(values, key, _ABSENT) for key in keys.extra_keys}
    metadata |= {key: value for key, value in extra.items() if value is not _ABSENT}
    if keys.tools_key:
        metadata[TOOLS], bad = row_tools(value_at(values, keys.tools_key))
        wrong = wrong or bad
    if keys.chat_template_kwargs_key:
        metadata[TEMPLATE_KWARGS], bad = row_template_kwargs(value_at(values, keys.chat_template_kwargs_key))
        wrong = wrong or bad
    if keys.sampling_key:
        metadata[SAMPLING], bad = row_sampling(value_at(values, keys.sampling_key))
        wrong = wrong or bad
    problem = problem or wrong or _not_storable({"prompt": prompt, "label": label, "metadata": metadata})
    if problem:
        return refuse(keys, row, problem, _shown(values, keys))
    text = _encoder.encode(prompt)
    found = tuple(images.found) if images else ()
    return PromptRow(keys.name, row, prompt_id(keys.name, row, text), prompt, label, metadata, found)


def value_at(values: Mapping[str, Any], key: str, absent: Any = None) -> Any:
    """The value of a row under a key: a column's name, or a dotted path into the mappings of a column.

    A column whose own name holds dots comes first.
    """
    if key in values:
        return values[key]
    at: Any = values
    for part in key.split("."):
        if isinstance(at, list):
            at = _mapping_of(at)
        if not isinstance(at, Mapping) or part not in at:
            return absent
        at = at[part]
    return at


def column_of(key: str, columns: Collection[str]) -> str:
    """The column in which a key starts; the key may be a dotted path."""
    return key if key in columns else key.partition(".")[0]


def require_labels(rows: Sequence[PromptRow], keys: Keys) -> tuple[list[PromptRow], list[Quarantined]]:
    """Rows with a label, and refused rows: either every row of a source has a label, or none, for rewards that need none."""
    named = keys.label_key is not None or keys.label_from_prompt
    if not named or all(row.label is None for row in rows):
        return list(rows), []
    refused = [without_label(row, keys) for row in rows if row.label is None]
    return [row for row in rows if row.label is not None], refused


def without_label(row: PromptRow, keys: Keys) -> Quarantined:
    """A row that lacks the label which other rows of its source have."""
    reason = f"missing key: {keys.label_key} (other rows of the source have it)"
    if keys.label_from_prompt:
        reason = "no answer: the last message is not text of the assistant (in other rows it is)"
    return refuse(keys, row.row, reason, _shown(row.prompt))


def too_long(row: PromptRow, keys: Keys, length: int, limit: int) -> Quarantined:
    """A row whose prompt, or whole dialogue, has more tokens than a run takes."""
    reason = f"too long: {length} tokens, data.max_prompt_tokens is {limit}"
    return refuse(keys, row.row, reason, str(row.prompt))


def far_too_long(row: PromptRow, keys: Keys, limit: int) -> Quarantined | None:
    """A row whose prompt has more characters than `limit` tokens hold: tokenising it would take gigabytes. None for others."""
    prompt = row.prompt if isinstance(row.prompt, list) else [{"content": row.prompt}]
    length = sum(len(text_alone(message["content"])) for message in prompt)
    if length <= max(ALWAYS_TOKENISED, limit * CHARACTERS_A_TOKEN):
        return None
    reason = f"too long: {length} characters, data.max_prompt_tokens is {limit}"
    return refuse(keys, row.row, reason, str(row.prompt))


def refuse(keys: Keys, row: int, reason: str, shown: str) -> Quarantined:
    """An unusable row, with the start of its content."""
    return Quarantined(keys.name, row, whole(reason), whole(shown[:EXCERPT]))


def _prompt(value: Any, keys: Keys, images: RowImages | None) -> Prompt:
    """The prompt. Raises ValueError, with `kind of reason: details`, for a value that is no prompt."""
    trained = keys.loss_on != "answer"
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("empty prompt: only white space")
        try:
            messages = from_text(value) if keys.chat or trained else None
        except ValueError as error:
            raise ValueError(f"wrong type: the prompt is text; {error}") from error
        if messages is None and images is None:
            return value
        value = messages or [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"wrong type: the prompt is {_type(value)}, not text or a list of messages")
    read = [
        _message(number, message, images)
        for number, message in enumerate(from_sharegpt(value, SWITCHES if trained else ()))
    ]
    if not any(_has_content(message["content"]) for message in read):
        raise ValueError("empty prompt: no message has content")
    return with_read_arguments(read) if keys.tools_key is not None or trained else read


def _has_content(content: Any) -> bool:
    return isinstance(content, list) or bool(content.strip())


def _message(number: int, given: Any, images: RowImages | None) -> dict[str, Any]:
    """A message of a prompt. Raises ValueError, with `kind of reason: details`."""
    place = f"bad message: number {number}"
    if not isinstance(given, Mapping):
        raise ValueError(f"{place}: {_type(given)}, not an object")
    if given.get("role") not in ROLES:
        raise ValueError(f"{place}: role is {str(given.get('role'))[:20]!r}, not one of {', '.join(ROLES)}")
    content = given.get("content")
    if isinstance(content, int | float):
        raise ValueError(f"{place}: content is {_type(content)}")
    try:
        message = message_of(given, images)
    except NotTextError as error:
        raise ValueError(f"not text: message {number}: {error}") from error
    except NotJsonError as error:
        raise ValueError(f"{place}: its tool_calls are text that is not JSON") from error
    if content is None and "tool_calls" not in message:
        raise ValueError(f"{place}: content is null")
    return message


def _check_trainable(prompt: Prompt, loss_on: LossOn) -> None:
    """Raises ValueError for a dialogue that has nothing to train."""
    if isinstance(prompt, str):
        raise ValueError("wrong type: the dialogue is text, not a list of messages")
    trained_messages(prompt, loss_on)


def _without_answer(prompt: Prompt) -> tuple[Prompt, str | None]:
    """A dialogue without the assistant's text that ends it, and that text."""
    if isinstance(prompt, str) or prompt[-1]["role"] != "assistant":
        return prompt, None
    return prompt[:-1], text_alone(prompt[-1]["content"]) or None


def _metadata(value: Any) -> tuple[dict[str, Any], str | None]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            return {}, "wrong type: metadata is text that is not JSON"
    if value is None:
        return {}, None
    if isinstance(value, list):
        value = _mapping_of(value)
    if not isinstance(value, Mapping):
        return {}, f"wrong type: metadata is {_type(value)}, not an object"
    return dict(value), None


def _mapping_of(value: list[Any]) -> Any:
    """Arrow's form of a map, a list of pairs, as a mapping; any other list is returned unchanged."""
    if all(isinstance(item, tuple) and len(item) == 2 for item in value):
        return {str(name): item for name, item in value}
    return value


def _not_storable(values: dict[str, Any]) -> str | None:
    """Which of these values cannot be stored as JSON in UTF-8, and why."""
    if _json_problem(values) is None:  # one pass for most rows
        return None
    problems = ((name, _json_problem(value)) for name, value in values.items())
    return next(
        (f"{problem}, in the {name}" for name, problem in problems if problem),
        "wrong type: nested too deeply",
    )


def _json_problem(value: Any) -> str | None:
    try:
        _encoder.encode(value).encode("utf-8")
    except UnicodeEncodeError:
        return "not UTF-8: a lone surrogate"
    except (TypeError, ValueError, RecursionError) as error:
        return f"wrong type: {error}"
    return None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _type(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _shown(value: Any, keys: Keys | None = None) -> str:
    """A row's content for reading; its pictures are left out."""
    if keys and keys.images_key and isinstance(value, Mapping):
        value = {name: item for name, item in value.items() if name != column_of(keys.images_key, value)}
    return json_text(value, default=str)
