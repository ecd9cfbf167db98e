"""The `data` section: sources of prompts, and what is drawn from them when."""

from millrace.core.config.data.curriculum import CurriculumStage, Levels, Pools
from millrace.core.config.data.section import Data
from millrace.core.config.data.source import Source

__all__ = ["Data", "Levels", "Pools", "Source", "CurriculumStage"]
