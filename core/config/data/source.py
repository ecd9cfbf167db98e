"""One source of prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from millrace.core.config.data.curriculum import Levels, Pools
from millrace.core.config.data.prompt_rows import PromptRows
from millrace.core.config.parts.paths import READS
from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.user_function import UserFunction


class Source(PromptRows):
    """One set of prompts."""

    path: Annotated[str, ANY_START, READS] = Field(
        "",
        description="JSONL or Parquet file, a folder of them, a pattern (data/*.jsonl) or a folder of `save_to_disk`; path or fsspec URL. `@[first:last]` after it takes a slice of the rows. Or leave it out, and name a function in `rows`.",
    )
    rows: UserFunction | None = Field(
        None,
        description="Instead of a path: a function (millrace.DataSource) that returns the rows, as a list or anything else with a length and numbered items. Called in a separate process.",
    )
    levels: Levels | None = Field(
        None,
        description="Levels of difficulty that follow the policy: `rows` is called with each `level`. null: one level.",
    )
    pools: Pools | None = Field(
        None,
        description="Solved and unsolved rows come less often, from the source's second pass on. null: each row once a pass.",
    )
    weight: float = Field(
        1.0, gt=0, description="Share of the prompts drawn from this source, relative to the others."
    )
