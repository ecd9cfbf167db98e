"""Everything a configuration names, touched once before anything starts.

Owns the order of the check and what is shown of a plan; imports no torch, ray, prefect, mlflow or transformers.
"""

from __future__ import annotations

from core.config import RunConfig, rules
from core.config.problems import Problem


def check(config: RunConfig, prepared: bool = False) -> list[Problem]:
    """Everything wrong with a configuration, all at once."""
    return rules.problems(config)
