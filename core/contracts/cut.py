"""cut.json: which groups an iteration trains and which it defers, where those that finish first fill the batch.

Committed before the requests of the others are ended: what time decided is data before it has an effect.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Cut(BaseModel):
    """Groups by id, in the order of the iteration's list. Those in none of the lists were dropped by a filter."""

    model_config = ConfigDict(extra="forbid")

    trained: list[str]
    deferred: dict[str, int]  # and how many times each was deferred, this time included
    returned: list[str] = []
    parts: list[str]  # of rewards, which it was decided from
