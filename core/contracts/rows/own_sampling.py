"""What a row may set for its own samples: their length and their stops. Pure.

Temperature and other parameters of the distribution are the same for the batch: the trainer computes log-probabilities with
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millrace.core.contracts.rows.chat_options import from_json

SAMPLING = "sampling"  # key in a row's metadata
LENGTH, STOP, STOP_IDS, STOP_REGEX = "max_new_tokens", "stop", "stop_token_ids", "stop_regex"
OWN = (LENGTH, STOP, STOP_IDS, STOP_REGEX)


def row_sampling(value: Any) -> tuple[dict[str, Any], str | None]:
    """The sampling parameters in a column, which may be JSON text, and what is wrong with them. Null counts as not given."""
    value, problem = from_json(value, SAMPLING)
    if problem or value is None:
        return {}, problem
    if not isinstance(value, Mapping):
        return {}, f"wrong type: {SAMPLING} is {type(value).__name__}, not an object"
    given = {str(name): item for name, item in value.items() if item is not None}
    unknown = sorted(given.keys() - set(OWN))
    if unknown:
        return {}, f"bad {SAMPLING}: {unknown[0]} is not a row's to say, only {', '.join(OWN)}"
    length, stop, ids = given.get(LENGTH, 1), given.get(STOP, []), given.get(STOP_IDS, [])
    if not _is_whole(length) or length < 1:
        return {}, f"bad {SAMPLING}: {LENGTH} is {length!r}, not a whole number from 1"
    if not isinstance(stop, list) or not all(isinstance(item, str) and item for item in stop):
        return {}, f"bad {SAMPLING}: {STOP} is not a list of texts"
    if not isinstance(ids, list) or not all(_is_whole(item) and item >= 0 for item in ids):
        return {}, f"bad {SAMPLING}: {STOP_IDS} is not a list of token ids"
    patterns = given.get(STOP_REGEX, [])
    if not isinstance(patterns, list) or not all(isinstance(item, str) and _ends(item) for item in patterns):
        return (
            {},
            f"bad {SAMPLING}: {STOP_REGEX} is not a list of regular expressions, none of which fits the empty text",
        )
    return given, None


def own_sampling(metadata: Mapping[str, Any] | None, key: str | None, longest: int) -> dict[str, Any]:
    """The sampling parameters of a row with this metadata, which replace its section's.

    key: `sampling_key` of its source; without a key a row sets nothing. longest: `max_new_tokens` of the section. Memory is
    planned for it, so a row can only shorten it.
    """
    own = dict((metadata or {}).get(SAMPLING) or {}) if key else {}
    if LENGTH in own:
        own[LENGTH] = min(own[LENGTH], longest)
    return own


def _ends(pattern: str) -> bool:
    """Whether a pattern is a regular expression that does not match the empty response."""
    try:
        return re.compile(pattern).search("") is None
    except re.error:
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
