"""Removes secrets from a configuration's values before they are shown, stored or compared. Pure.

A secret is recognised by its place: the password of a URL, or the value of a key with a name such as api_key.
"""

import re
from collections.abc import Mapping
from typing import Any

from millrace.core.contracts.references import REFERENCE

HIDDEN = "***"
WORDS = (
    r"(?:(?:api|access|secret|private|auth|admin|account|encryption|subscription|shared|signing)[_-]?keys?"
    r"|(?:api|access|auth)?token|secrets?|passwords?|passwd|passphrase|credentials?|authorization|signature|sig"
    r"|cookies?|jwt|connection[_-]?string)"
)
VALUE = r"(?:\$\{(?:env|prefect):[\w-]+\}|[^&\s#,}'\"]|,(?=[^\s'\"]))+"
SCHEME = r"(?:(?:Bearer|Basic|Token|Digest|ApiKey)\s{1,3})"  # scheme of an Authorization header
SECRET_NAME = re.compile(rf"^(?:.{{0,60}}[_.-])?{WORDS}$", re.IGNORECASE)
OF_A_TOKENIZER = re.compile(
    r"(?:^|[_.-])(?:stop|eos|bos|pad|unk|sep|cls|mask|end|start|begin|first|last|next|special|image)[_-]token$",
    re.IGNORECASE,
)
USER = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?P<user>[^/\s@?#]{1,500})@")
QUERY = re.compile(rf"(?P<name>[?&][\w.-]{{0,40}}{WORDS}=){VALUE}", re.IGNORECASE)
QUOTED = r"(?P<quote>['\"])(?:\\.|(?!(?P=quote))[^\n\\])+"  # up to the quote's end, or the line's
SAID = re.compile(
    rf"(?P<name>{WORDS}['\"]?\s{{0,3}}[=:]\s{{0,3}})(?:{QUOTED}|{SCHEME}?{VALUE})", re.IGNORECASE
)
# secret in any place: the text of an Authorization header, and keys with the prefix of a service's keys
KNOWN = re.compile(
    r"(?P<name>\b(?:Bearer|Basic)\s{1,3})(?=[\w.~+/=-]{0,99}[\d=+/])[\w.~+/=-]{12,}"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AIza)[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b"
)
# schemes of URLs in which a user without a password is no secret
NAMED_USER = ("postgresql", "mysql", "mssql")


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret."""
    return bool(SECRET_NAME.match(name)) and not OF_A_TOKENIZER.search(name)


def is_reference(value: Any) -> bool:
    """Whether a value refers to its secret."""
    return isinstance(value, str) and bool(REFERENCE.search(value))


def secret_in_url(text: str) -> bool:
    """Whether a URL holds a password, a user that may be a token, or a signature."""
    found = USER.search(text)
    if found and not REFERENCE.search(found["user"]):
        dialect = found["scheme"].partition(":")[0].partition("+")[0].lower()
        if ":" in found["user"] or dialect not in NAMED_USER:
            return True
    return "://" in text and not all(is_reference(query[0]) for query in QUERY.finditer(text))


def is_known_secret(text: str) -> bool:
    """Whether a text holds a secret that is recognised without its name."""
    return bool(KNOWN.search(text))


def shown(value: Any) -> Any:
    """A value without its secrets, within mappings and lists and in text; references stay."""
    if isinstance(value, Mapping):
        return {
            name: item if is_reference(item) or not _hides(name, item) else HIDDEN
            for name, item in ((name, shown(item)) for name, item in value.items())
        }
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return shown_text(value) if isinstance(value, str) else value


def shown_text(text: str) -> str:
    """A text, as of a message or a line of a file, without the secrets in it; references stay."""
    text = USER.sub(lambda m: m[0] if is_reference(m["user"]) else f"{m['scheme']}{HIDDEN}@", text)
    text = QUERY.sub(lambda m: m[0] if is_reference(m[0]) else f"{m['name']}{HIDDEN}", text)
    text = SAID.sub(lambda m: m[0] if is_reference(m[0]) else f"{m['name']}{m['quote'] or ''}{HIDDEN}", text)
    return KNOWN.sub(lambda m: f"{m['name'] or ''}{HIDDEN}", text)


def without_secrets(value: Any) -> Any:
    """A value for comparison: two secrets are equal, and so are a secret and a reference to one."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _hides(name, item) else without_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        return REFERENCE.sub(HIDDEN, shown_text(value))
    return value


def _hides(name: Any, value: Any) -> bool:
    return isinstance(value, str) and is_secret_name(str(name))
