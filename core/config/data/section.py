"""The `data` section."""

from typing import Annotated

from pydantic import Field

from millrace.core.config.data.curriculum import CurriculumStage
from millrace.core.config.data.prompt_rows import Source
from millrace.core.config.parts.restart import ANY_START, fixed
from millrace.core.config.parts.section import Section

EPOCHS = "the order of prompts follows from it"


class Data(Section):
    """Which prompts are trained on, and in which order."""

    sources: Annotated[list[Source], fixed(EPOCHS)] = Field(min_length=1, description="Sources of prompts.")
    stages: Annotated[list[CurriculumStage], fixed(EPOCHS)] = Field(
        [],
        description="Stages of a curriculum, one after the other, each with its weights. Empty: the sources' weights hold throughout.",
    )
    stream_above_rows: Annotated[int, fixed(EPOCHS)] = Field(
        20_000,
        ge=0,
        description="Sources with more rows than about this are read row by row, as prompts are drawn. Smaller ones are read and checked whole at the start.",
    )
    shuffle: Annotated[bool, fixed(EPOCHS)] = Field(
        True, description="Shuffle each epoch by the run's seed and the epoch."
    )
    max_prompt_tokens: Annotated[int, fixed(EPOCHS)] = Field(
        1024,
        ge=1,
        description="Longer prompts are quarantined; so are longer dialogues if `loss_on` trains dialogues. Tokens.",
    )
    max_image_tokens: Annotated[int, fixed(EPOCHS)] = Field(
        256,
        ge=1,
        description="Larger pictures are made smaller, to at most this many tokens; the model's own limit holds too. Tokens.",
    )
    max_quarantined_share: Annotated[float, ANY_START] = Field(
        0.5,
        ge=0,
        le=1,
        description="Stop before training if more than this share of a source's rows is unusable.",
    )
    allow_changes: Annotated[bool, ANY_START] = Field(
        False,
        description="Continue a run although its data changed: from the first open iteration on, epochs restart with the data as it is now.",
    )
