"""Prompts and answers as token ids: the model's tokenizer and its chat template.

Prompts and reference answers become tokens here. What an engine generated is not tokenised again. MILLRACE_HOME keeps which
tokenizer class transformers chose for a folder: to choose it, transformers imports torch, scikit-learn and pandas, which takes
400 MiB and more than half of a driver's start time. The choice depends only on the folder's small files and the installed
versions, so only a new folder needs the imports.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from millrace.connectors.host.local_files import home, write_whole
from millrace.connectors.huggingface.answer_ends import AnswerEnds, unseen_by_row
from millrace.connectors.huggingface.suffix import turn_end
from millrace.core.config.model import Model
from millrace.core.contracts.rows.chat_options import PLAIN, ChatOptions
from millrace.core.contracts.rows.messages import with_system
from millrace.core.contracts.rows.prompts import Prompt
from millrace.core.errors import ConfigError
from millrace.core.families.chat_templates import TemplateLimitError, apply_template
from millrace.core.families.tokenizer_file import before_text, engine_ends
from millrace.core.plain_text import whole

READ_FILES = ("config.json", "tokenizer_config.json")
LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "mistral-common", "torch")
# only transformers' classes: code in a model's folder is not installed, and may change
KIND = re.compile(r"transformers\.[\w.]+:\w+")
KEPT = 100  # newest records


def remembered_kind(folder: str) -> str | None:
    """The class chosen for these files and versions, as `module:class`; None if it is not cached."""
    record = _record(folder)
    if record is None:
        return None
    try:
        kind = record.read_text()
    except FileNotFoundError:
        return None
    # the caller imports this name, so accept only what remember_kind writes
    return kind if KIND.fullmatch(kind) else None


def remember_kind(folder: str, kind: str) -> None:
    """Store the class for later processes."""
    record = _record(folder)
    if record is None or not KIND.fullmatch(kind):
        return
    write_whole(record, [kind.encode()])
    newest = sorted(record.parent.glob("[!.]*"), key=lambda each: each.stat().st_mtime, reverse=True)
    for old in newest[KEPT:]:
        old.unlink(missing_ok=True)


def _record(folder: str) -> Path | None:
    """The cache's file; None if the folder is not on this host, since transformers would look for the name on the Hub."""
    path = Path(folder)
    if not path.is_dir():
        return None
    settled_by = {
        "versions": [_version(name) for name in LIBRARIES],
        # transformers recognises some models by the start of their names; an absolute path never matches
        "name": "" if path.is_absolute() else folder,
        "files": sorted(each.name for each in path.iterdir() if each.is_file()),
        "contents": [_hash(path / name) for name in READ_FILES],
    }
    key = hashlib.sha256(json.dumps(settled_by).encode()).hexdigest()
    return home() / "tokenizers" / key


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _hash(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


class PromptTokenizer:
    """A Hugging Face tokenizer with a chat template."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        folder: str | None = None,
        template_of: str = "",
    ) -> None:
        """tools: schemas of the functions that the model may call, shown in every prompt. folder: the model's.

        template_of: the field that names the chat template, with its value, for error messages.
        """
        self._template_of = template_of
        self.tokenizer = tokenizer
        self._folder = folder
        self._tools = list(tools)

    @property
    def kind(self) -> str:
        """The tokenizer's class, in the form that `load` accepts."""
        return _kind(self.tokenizer)

    @classmethod
    def load(
        cls, model: Model, tools: Sequence[Mapping[str, Any]] = (), kind: str | None = None
    ) -> PromptTokenizer:
        """Load from model.tokenizer, by default model.path. model.chat_template replaces the template.

        kind: the tokenizer's class, if another process has chosen it.
        Raises ConfigError naming the field.
        """
        field, folder = (
            ("model.tokenizer", model.tokenizer) if model.tokenizer else ("model.path", model.path)
        )
        try:
            tokenizer = _class(kind).from_pretrained(folder) if kind else _chosen(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no tokenizer can be loaded: {error}",
                where=f"{field} = {folder}",
                remedy="name a folder with a tokenizer's files",
            ) from error
        if model.chat_template:
            try:
                tokenizer.chat_template = Path(model.chat_template).read_text()
            except OSError as error:
                raise ConfigError(
                    f"cannot be read: {error}",
                    where=f"model.chat_template = {model.chat_template}",
                    remedy="correct the path",
                ) from error
        template_of = (
            f"model.chat_template = {model.chat_template}" if model.chat_template else f"{field} = {folder}"
        )
        return cls(tokenizer, tools, model.path, template_of)

    def encode_prompts(
        self,
        prompts: Sequence[Prompt],
        *,
        chat: bool,
        system: str | None = None,
        options: Sequence[ChatOptions] | None = None,
    ) -> list[list[int]]:
        """Token ids of prompts, ready for generation. With `chat`, a string becomes one user message.

        options: one for each prompt.
        """
        if not prompts:
            return []
        each = options or [PLAIN] * len(prompts)
        texts = [
            self.render(prompt, chat=chat, system=system, options=own)
            for prompt, own in zip(prompts, each, strict=True)
        ]
        return [
            self._before_text + ids if is_plain(prompt, chat) else ids
            for prompt, ids in zip(prompts, self.encode_texts(texts), strict=True)
        ]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that follow other texts, or come from a chat template. The tokenizer adds no special tokens."""
        ids: list[list[int]] = self.tokenizer([*map(whole, texts)], add_special_tokens=False)["input_ids"]
        return ids

    def encode_opening(self, text: str) -> list[int]:
        """Token ids of a plain text that opens a sequence."""
        return [*self._before_text, *self.encode_texts([text])[0]]

    def encode_response(self, text: str, chat: bool) -> list[int]:
        """Token ids of a reference answer with the token that ends it. chat: the chat template writes the prompt."""
        ids = self.encode_texts([text])[0]
        end = self.ends.trained(chat)
        return ids if end is None else [*ids, end]

    @cached_property
    def ends(self) -> AnswerEnds:
        """The tokens that end answers."""
        tokens = self.tokenizer.added_tokens_decoder
        special = {str(token): number for number, token in tokens.items() if token.special}
        turn = self._turn_end([text for text in (self.tokenizer.eos_token, *special) if text])
        return AnswerEnds(
            engine=tuple(engine_ends(self._folder)) if self._folder else (),
            turn=None if turn is None else self.tokenizer.convert_tokens_to_ids(turn),
            eos=self.tokenizer.eos_token_id,
            special=special,
        )

    def _turn_end(self, ends: Sequence[str]) -> str | None:
        """The token by which the chat template ends a turn. None if it has none, or accepts no message after a turn."""
        if self.tokenizer.chat_template is None:
            return None

        return turn_end(lambda messages, for_answer: self.templated(messages, for_answer=for_answer), ends)

    @cached_property
    def _before_text(self) -> list[int]:
        return before_text(
            lambda text, special: self.tokenizer(text, add_special_tokens=special)["input_ids"]
        )

    def unseen_by_row(self, metadata: Mapping[str, Any], *, skips_special: bool) -> str | None:
        """Why no answer can contain the stops in a row's metadata; None if it can. skips_special: answers' texts omit special tokens."""
        return unseen_by_row(metadata, self.ends.special if skips_special else (), len(self.tokenizer))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of an answer's token ids, as an engine returns it."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def render(self, prompt: Prompt, *, chat: bool, system: str | None, options: ChatOptions = PLAIN) -> str:
        """The text that is tokenised."""
        if is_plain(prompt, chat):
            return f"{system or ''}{prompt}"
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template",
                where="model.chat_template",
                remedy="name a template file, or set chat=false for sources whose prompts are plain text",
            )
        return self.templated(
            with_system([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, system),
            for_answer=True,
            tools=[*self._tools, *options.tools],
            template_kwargs=options.template_kwargs,
        )

    def templated(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        for_answer: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template writes for messages.

        Errors: TemplateRefusedError; ConfigError if the template exceeds its time or memory limit.
        """
        try:
            return apply_template(
                self.tokenizer, messages, for_answer=for_answer, tools=tools, template_kwargs=template_kwargs
            )
        except TemplateLimitError as error:
            raise ConfigError(
                f"the chat template is refused: {error}",
                where=self._template_of or f"model.path = {self.tokenizer.name_or_path}",
                remedy="name a template without such loops or texts in model.chat_template",
            ) from error


def is_plain(prompt: Prompt, chat: bool) -> bool:
    """Whether a prompt is sent unchanged, without the chat template."""
    return isinstance(prompt, str) and not chat


def _kind(tokenizer: Any) -> str:
    chosen = type(tokenizer)
    return f"{chosen.__module__}:{chosen.__name__}"


def _chosen(folder: str) -> Any:
    """Load the tokenizer with the class that transformers chooses for a folder's files."""
    kind = remembered_kind(folder)
    if kind is not None:
        return _class(kind).from_pretrained(folder)
    from transformers import AutoTokenizer

    # without this argument, transformers asks on the terminal whether the folder's code may run
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    remember_kind(folder, _kind(tokenizer))
    return tokenizer


def _class(kind: str) -> Any:
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this node's transformers has no tokenizer {name}: {error}",
            where=module,
            remedy="install the version of the driver on every node",
        ) from error
