"""All rules together."""

from __future__ import annotations

from millrace.core.config import checkpoint_rules as checkpoint
from millrace.core.config import eager_rules as eager
from millrace.core.config import engines_rules as engines
from millrace.core.config import evaluation_rules as evaluation
from millrace.core.config import pipeline_rules as pipeline
from millrace.core.config import placement_rules as placement
from millrace.core.config import secret_rules as secrets
from millrace.core.config import storage_rules as storage
from millrace.core.config import sync_rules as sync
from millrace.core.config import tracking_rules as tracking
from millrace.core.config import trainer_rules as trainer
from millrace.core.config.algorithm import rules as algorithm
from millrace.core.config.data import rules as data
from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import rules as rollout
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> list[Problem]:
    """Everything that fields say against each other, all at once; empty when they agree."""
    return [*secrets.problems(config), *between_fields(config)]


def between_fields(config: RunConfig) -> list[Problem]:
    """All problems between fields, without the search of each value for a secret."""
    return [
        *trainer.problems(config),
        *rollout.problems(config),
        *algorithm.problems(
            config.algorithm,
            config.rollout,
            filter=config.filter,
            steps_per_iteration=max(1, config.steps_per_iteration),
            ages=_ages(config),
        ),
        *data.problems(config),
        *evaluation.problems(config),
        *checkpoint.problems(config),
        *storage.problems(config),
        *tracking.problems(config),
        *engines.problems(config),
        *placement.problems(config),
        *pipeline.problems(config),
        *eager.problems(config),
        *sync.problems(config),
    ]


def _ages(config: RunConfig) -> tuple[int, int]:
    """Age that all tokens of an iteration may have, and the largest of any, in published versions."""
    p, buffer = config.pipeline, config.rollout.buffer
    reused = -(-buffer.max_age // max(1, config.steps_per_iteration)) if buffer is not None else 0
    return p.oldest, max(p.staleness, reused)
