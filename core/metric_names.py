"""Names of metrics that contain text from data: a subset, a part of a reward, a source.

Two texts never become one name. `name_part` puts a text into a name, whose parts are between slashes; `portable_name` writes a
whole name in the few characters that every tracker takes. Pure.
"""

import hashlib
import re

from millrace.core.plain_text import whole

PASS_AT = re.compile(r"reward/pass@\d+")
IN_A_PART = re.compile("[/%\x00-\x1f\x7f-\x9f]")
ODD = re.compile(r"[^A-Za-z0-9_.\- /]")
LONGEST, DIGEST = 250, 16  # characters, as MLflow takes
EMPTY, CUT = ":empty:", "::"


def name_part(text: str) -> str:
    """A text as one part of a name: readable, never empty, never the name of a parent folder. A slash is %2F."""
    text = whole(text)
    if set(text) <= {"."}:
        return "%" + "%2E" * len(text)
    return IN_A_PART.sub(lambda found: f"%{ord(found[0]):02X}", text)


def portable_name(name: str) -> str:
    """A name in letters, digits, spaces and _.-:/ alone, at most 250. Any other character becomes its number, as in :26:.

    The end of a longer name is a hash.
    """
    if PASS_AT.fullmatch(name):
        return name.replace("@", "_at_")
    made = "/".join(map(_portable, whole(name).split("/")))
    if len(made) <= LONGEST:
        return made
    digest = hashlib.sha256(made.encode()).hexdigest()[:DIGEST]
    kept = made[: LONGEST - DIGEST - len(CUT)].rstrip("/")
    return f"{kept}{CUT}{digest}"


def _portable(part: str) -> str:
    if not part:
        return EMPTY
    # a name must not look like a path that leads elsewhere
    rest = part.lstrip(".")
    return ":2e:" * (len(part) - len(rest)) + ODD.sub(lambda found: f":{ord(found[0]):x}:", rest)
