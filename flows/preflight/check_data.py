"""Check prompts against the first rows of each file: keys, labels, template, length, reward.

Imports no torch and no transformers. Calls a reward that ships with millrace once; never calls a user's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields
from typing import Any

from millrace.connectors.huggingface.template import last_text
from millrace.connectors.storage.prompts import first_rows
from millrace.core.config import RunConfig
from millrace.core.config.data import Source
from millrace.core.config.evaluation import EvalSet
from millrace.core.config.parts.problems import Problem
from millrace.core.contracts.prompts import PromptRow, Quarantined
from millrace.core.contracts.references import resolved
from millrace.core.errors import MillraceError, MissingColumnError
from millrace.core.hooks import RewardInput, load
from millrace.flows.preflight.check_model import Checkpoint

ROWS = 64
RENDERED = 8


class Rows:
    """The first rows of a source: those that can be used, and those that cannot."""

    def __init__(self, field: str, source: Source | EvalSet) -> None:
        self.field = field
        self.source = source
        self.usable: list[PromptRow] = []
        self.refused: list[Quarantined] = []

    def read(self) -> list[Problem]:
        """Read the rows; returns problems of the file itself. Runs in a thread of its own."""
        path = self.source.path
        try:
            self.usable, self.refused = first_rows(self.source, ROWS)
        except MissingColumnError as error:
            return [Problem(f"{self.field}.prompt_key", self.source.prompt_key, error.reason, error.remedy)]
        except MillraceError as error:
            return [Problem(f"{self.field}.path", path, error.reason, error.remedy or "correct the path")]
        if self.usable:
            return []
        if not self.refused:
            return [Problem(f"{self.field}.path", path, "holds no rows", "give a file with prompts")]
        return [self._none_usable()]

    def _none_usable(self) -> Problem:
        kind, count = Counter(item.reason.split(":")[0] for item in self.refused).most_common(1)[0]
        example = next(item for item in self.refused if item.reason.startswith(kind))
        if kind == "missing key":
            return Problem(
                f"{self.field}.prompt_key",
                self.source.prompt_key,
                f"none of the first {len(self.refused)} rows of {self.source.path} has it: {example.excerpt}",
                "set it to the key that holds the prompt",
            )
        return Problem(
            f"{self.field}.path",
            self.source.path,
            f"none of its first {len(self.refused)} rows can be used; {count} times {example.reason}",
            "write a JSON object with the prompt on each line",
        )


def sources(config: RunConfig) -> list[Rows]:
    """Every source and evaluation set, not read yet."""
    training = [Rows(f"data.sources.{source.name}", source) for source in config.data.sources]
    held_out = [Rows(f"evaluation.sets.{held_out.name}", held_out) for held_out in config.evaluation.sets]
    return training + held_out


def check_rows(config: RunConfig, rows: Rows, model: Checkpoint) -> Iterator[Problem]:
    """Problems of the rows that were read, under the model's template and tokenizer."""
    if not rows.usable:
        return
    yield from _labels(config, rows)
    texts = yield from _rendered(rows, model)
    if model.tokenizer is None or not texts:
        return
    limit = config.data.max_prompt_tokens
    lengths = [len(model.tokenizer.encode(text).ids) for text in texts]
    if min(lengths) > limit:
        yield Problem(
            "data.max_prompt_tokens",
            limit,
            f"each of the first {len(lengths)} prompts of {rows.source.path} is longer, the shortest {min(lengths)} tokens",
            f"set it to {max(lengths)} or more",
        )


def _labels(config: RunConfig, rows: Rows) -> Iterator[Problem]:
    key = rows.source.label_key
    labels = [row.label for row in rows.usable]
    missing = all(label is None for label in labels)
    field = f"{rows.field}.label_key"
    if key not in (None, "label") and missing:
        yield Problem(
            field,
            key,
            f"none of the first {len(labels)} rows of {rows.source.path} has it",
            "set it to the key that holds the reference answer, or to null for rewards that need none",
        )
    elif config.algorithm.supervised:
        if key is not None and not any(isinstance(label, str) and label for label in labels):
            yield Problem(
                field,
                key,
                f"algorithm.loss=sft learns text, and none of the first {len(labels)} rows of {rows.source.path} has text there",
                "set it to the key that holds the reference answer",
            )
    elif missing and _reads_label(config, rows.usable[0]):
        yield Problem(
            field,
            key,
            f"{config.reward.function} compares with the label, and none of the first {len(labels)} rows of "
            f"{rows.source.path} has one",
            "set it to the key that holds the reference answer, or take another reward.function",
        )


class _Watched(RewardInput):
    """A sample that records whether its label was read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "label":
            object.__setattr__(self, "label_was_read", True)
        return object.__getattribute__(self, name)


def _reads_label(config: RunConfig, row: PromptRow) -> bool:
    """Whether a reward that ships with millrace reads the label; False for a user's reward, which is not called."""
    if not config.reward.function.startswith("millrace.core.rewards."):
        return False
    values: dict[str, Any] = {
        "prompt": row.prompt,
        "response": "",
        "metadata": row.metadata,
        "status": "completed",
    }
    sample = _Watched(
        **{field.name: values[field.name] for field in fields(RewardInput) if field.name in values}
    )
    with contextlib.suppress(MillraceError, ValueError, TypeError, LookupError, AttributeError):
        options = resolved(config.reward.options, "reward.options")
        load(config.reward.function)(sample, **options)
    return getattr(sample, "label_was_read", False)


def _rendered(rows: Rows, model: Checkpoint) -> Generator[Problem, None, list[str]]:
    """Yields problems of the template; returns the texts that it makes of the first rows."""
    source, first = rows.source, rows.usable[:RENDERED]
    plain = [row.prompt for row in first if isinstance(row.prompt, str) and not source.chat]
    chats = [row.prompt for row in first if not isinstance(row.prompt, str) or source.chat]
    texts = [(source.system or "") + text for text in plain]
    if chats and not model.has_template and model.shape:
        yield Problem(
            "model.chat_template",
            None,
            f"the tokenizer has no chat template, which the prompts of {rows.field} need",
            f"name a file with one, or set {rows.field}.chat=false if they are plain text",
        )
    if not chats or model.template is None:
        return texts
    try:
        for chat in chats:
            texts.append(model.template.render(chat, source.system))
    except ValueError as error:
        yield _refused(rows, model, chats, error)
        return []
    lost = [
        chat for chat, text in zip(chats, texts[len(plain) :], strict=True) if last_text(chat) not in text
    ]
    if lost:
        yield Problem(
            "model.chat_template",
            None,
            f"it leaves out the prompt: {last_text(lost[0])[:40]!r} of {rows.field} is not in the text it makes",
            "have it write message['content'] of every message",
        )
    return texts


def _refused(rows: Rows, model: Checkpoint, chats: Sequence[Any], error: ValueError) -> Problem:
    system = rows.source.system
    if system and model.template:
        try:
            model.template.render(chats[0], None)
        except ValueError:
            pass
        else:
            return Problem(
                f"{rows.field}.system",
                system,
                f"the chat template takes no system message: {error}",
                "remove it, or put it into the prompts",
            )
    return Problem(
        "model.chat_template",
        None,
        f"it fails on the prompts of {rows.field}: {error}",
        "correct the template, or name another file",
    )
