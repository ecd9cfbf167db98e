"""The `data` section: sources of prompts, and what is drawn from them when."""

from millrace.core.config.data.curriculum import CurriculumStage, Levels, Pools
from millrace.core.config.data.prompt_rows import Source
from millrace.core.config.data.section import Data

__all__ = ["Data", "Levels", "Pools", "Source", "CurriculumStage"]
