"""What a driver and its shards work on: the batch of an iteration, or an evaluation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """The batch of an iteration."""

    index: int


@dataclass(frozen=True)
class EvaluationTopic:
    """An evaluation of the held-out sets at the weights of one version."""

    index: int  # of the iteration whose folder has its parts
    done: int  # iterations trained
    version: int
    task: str  # that makes it


Topic = Batch | EvaluationTopic
