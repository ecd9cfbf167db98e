"""Resolved configurations that older runs stored, lifted to today's fields. Pure.

run.json holds a run's resolved configuration and, beside it, the version of its shape. Every reader of a stored one goes
through here, so that an older run can still be resumed, replayed, shown and verified.
"""

from __future__ import annotations

NEW_FIELDS: dict[str, str] = {}
