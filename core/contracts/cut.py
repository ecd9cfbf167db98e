"""cut.json: which groups an iteration trains and which it defers, if the first groups to finish fill the batch.

Committed before the requests of the other groups are ended: what timing decided is stored before it has an effect.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Cut(BaseModel):
    """Groups by id, in the order of the iteration's list. Groups in none of the lists were dropped by a filter."""

    model_config = ConfigDict(extra="forbid")

    trained: list[str]
    deferred: dict[str, int]  # how many times each group was deferred, this time included
    returned: list[str] = []
    parts: list[str]  # parts of rewards that the cut was decided from
