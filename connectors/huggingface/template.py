"""A checkpoint folder's tokenizer files and chat template, read without transformers.

Owns checks that take a fraction of a second, before anything starts. A run's tokens come from `tokenizer`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.core.contracts.rows.messages import with_system
from millrace.core.contracts.rows.prompts import Prompt
from millrace.core.families.chat_templates import renderer, with_arguments_for
from millrace.core.families.tokenizer_file import load_tokenizer_file

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TokenizerFolder:
    """The files of a tokenizer. Raises ValueError with the problem if they cannot be used."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        if not any((self.folder / name).is_file() for name in VOCABULARIES):
            raise ValueError(f"holds no tokenizer ({', '.join(VOCABULARIES[:3])})")
        self.config: dict[str, Any] = self._json("tokenizer_config.json")
        self.special = {name: _text(self.config[name]) for name in SPECIAL if self.config.get(name)}

    def ends(self) -> list[str]:
        """Texts of the tokens that may end a turn: the special tokens, with the end of sequence first."""
        added = [
            _text(token)
            for token in (self.config.get("added_tokens_decoder") or {}).values()
            if isinstance(token, Mapping) and token.get("special")
        ]
        more = [_text(token) for token in self.config.get("additional_special_tokens") or []]
        return [token for token in dict.fromkeys([self.special.get("eos_token", ""), *added, *more]) if token]

    def template(self) -> str | None:
        """The tokenizer's chat template. Ignores chat_template.json, which belongs to a processor; tokenizers do not read it."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):
            by_name = {item.get("name"): item.get("template") for item in template}
            template = by_name.get("default")
        return template if isinstance(template, str) else None

    def load(self) -> Any:
        """The tokenizer as an object of the tokenizers library; None if the folder has only other formats."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"its tokenizer.json cannot be read: {error.strerror}") from error
        try:
            return load_tokenizer_file(path)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise ValueError(f"its tokenizer.json cannot be read: {error}") from error

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"its {name} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"its {name} is not JSON: {error}") from error
        return values if isinstance(values, dict) else {}


class ChatTemplate:
    """A chat template, rendered as transformers does. Raises ValueError with the line that does not parse."""

    def __init__(self, text: str, special: Mapping[str, str]) -> None:
        self.text = text
        self._special = dict(special)
        self.variables = renderer().variables(text)
        """The variables that it reads and does not set."""

    def render(
        self,
        prompt: Prompt,
        system: str | None = None,
        for_answer: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt, with tools and the template's variables; ready for an answer if `for_answer`.

        Raises ValueError with the template's message, or with the limit that it exceeds.
        """
        messages = with_system(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, system
        )
        variables = {
            "messages": with_arguments_for(self.text, messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": for_answer,
            **self._special,
            **(template_kwargs or {}),
        }
        return renderer().render(self.text, variables)


def last_text(prompt: Prompt) -> str:
    """Text that a rendered prompt must contain: its last message's, stripped; its last piece if pictures stand between."""
    if isinstance(prompt, str):
        return prompt.strip()
    content = prompt[-1].get("content", "")
    pieces = (
        [part["text"].strip() for part in content if "text" in part]
        if isinstance(content, list)
        else [str(content)]
    )
    return (pieces[-1] if pieces else "").strip()


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)
