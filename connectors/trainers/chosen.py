"""Which trainer a run has: `trainer.kind` names it, or the class that `trainer.rank` names."""

from collections.abc import Mapping
from typing import Any, cast

from millrace.connectors.trainers.fsdp.rank import FsdpRank
from millrace.connectors.trainers.learner_rank import LearnerRank
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.connectors.trainers.rank import Rank
from millrace.core.hooks.loading import load, search_in

KINDS: dict[str, type[LearnerRank]] = {"megatron": TrainerRank, "fsdp": FsdpRank}


def make_rank(config: Mapping[str, Any], rank: int, world_size: int) -> Rank:
    """A rank of the run's trainer, made in the rank's process. config: RunConfig as JSON. Raises ConfigError if it is not there."""
    yours = config["trainer"]["rank"]
    if yours is None:
        return KINDS[config["trainer"]["kind"]](config, rank, world_size)
    search_in(config["run"]["import_from"])
    return cast(Rank, load(yours, "trainer.rank")(config, rank, world_size))
