"""Which reward scores a sample: its row's, else its source's or held-out set's, else that of the section `reward`. Pure.

Owns the order, and the list of every reward that a configuration names. A row names a key of `reward.named`, never an import
path: data cannot choose code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.parts.user_function import UnknownNameError, named_by_row
from millrace.core.config.reward import RewardFunction, RewardSection

KEY = "reward"  # key of a row's metadata
TAKEN = ("function", "options")  # fields that are read of a part
MIXTURE = "millrace.core.rewards.format:mixture"
TOURNAMENT = "millrace.core.rewards.tournament.group_reward:tournament"


class UnknownRewardError(UnknownNameError):
    """A row names a reward that the configuration does not have."""


@dataclass(frozen=True)
class Selected:
    """A reward, and the field that names it."""

    field: str
    function: RewardFunction


def select(reward: RewardSection, own: Selected | None, metadata: Mapping[str, Any]) -> Selected:
    """The reward of a row. own: the reward of its source or set, if it has one.

    Without `reward.named`, the row's metadata choose nothing. Errors: UnknownRewardError.
    """
    named = named_by_row(reward.named, metadata, KEY, "reward.named", UnknownRewardError)
    if named is None:
        return own or Selected("reward", reward)
    return Selected(f"reward.named.{named.name}", named)


def own_rewards(config: RunConfig) -> tuple[dict[str, Selected], dict[str, Selected]]:
    """The rewards that sources set, by source, and the rewards that held-out sets set, by set."""
    sources = {
        source.name: Selected(f"data.sources.{source.name}.reward", source.reward)
        for source in config.data.sources
        if source.reward
    }
    sets = {
        held_out.name: Selected(f"evaluation.sets.{held_out.name}.reward", held_out.reward)
        for held_out in config.evaluation.sets
        if held_out.reward
    }
    return sources, sets


def all_rewards(config: RunConfig) -> Iterator[Selected]:
    """Every reward that a configuration names, and the parts of mixtures after each."""
    sources, sets = own_rewards(config)
    named = [Selected(f"reward.named.{each.name}", each) for each in config.reward.named]
    for found in (Selected("reward", config.reward), *named, *sources.values(), *sets.values()):
        yield found
        yield from _parts(found)


def _parts(mixture: Selected) -> Iterator[Selected]:
    """The rewards that a mixture is made of. Parts of another form are skipped here: the mixture refuses them."""
    parts = mixture.function.options.get("parts") if mixture.function.function == MIXTURE else None
    for number, part in enumerate(parts if isinstance(parts, list) else []):
        values = {name: part[name] for name in TAKEN if name in part} if isinstance(part, Mapping) else part
        try:
            function = RewardFunction.model_validate(values)
        except ValidationError:
            continue
        found = Selected(f"{mixture.field}.options.parts.{number}", function)
        yield found
        yield from _parts(found)


def comparisons(config: RunConfig) -> Iterator[tuple[str, UserFunction]]:
    """The functions by which tournaments compare, with their fields. Others are left to the tournament, which refuses them."""
    for found in all_rewards(config):
        compare = found.function.options.get("compare")
        if found.function.function == TOURNAMENT and compare:
            try:
                yield f"{found.field}.options.compare", UserFunction.model_validate(compare)
            except ValidationError:
                continue
