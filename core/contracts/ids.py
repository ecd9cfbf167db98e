"""Stable names and seeds: each is derived from what it names, so that the same thing made twice has the same name. Pure."""

import hashlib
from array import array
from collections.abc import Sequence

SEED_BITS = 62


def digest(*parts: str | int) -> str:
    """A hash of the parts in order, 32 hex digits; different lists of parts give different texts to hash."""
    text = "".join(f"{type(part).__name__}:{len(str(part))}:{part}" for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def prompt_id(source: str, row: int, content: str) -> str:
    """Id of a prompt: its source, its row and the row's content."""
    return digest("prompt", source, row, content)


def group_id(run: str, iteration: int, prompt: str, ordinal: int) -> str:
    """Id of a group: the draw of a prompt in an iteration of a run."""
    return digest("group", run, iteration, prompt, ordinal)


def sample_id(group: str, index: int) -> str:
    """Id of a sample: its group and its index within it."""
    return f"{group}-{index:04d}"


def branch_id(rollout: str, branch: int) -> str:
    """Id of a sample of a rollout that branched: the first one, branch 0, has the rollout's own id."""
    return f"{rollout}.{branch:02d}" if branch else rollout


def rollout_of(sample: str) -> str:
    """Id of a sample's rollout; the sample's own id if the rollout did not branch."""
    return sample.partition(".")[0]


def tokens_hash(ids: Sequence[int]) -> str:
    """A hash of token ids, 32 hex digits."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()


def turn_seed(seed: int, branch: int, turn: int) -> int:
    """Sampling seed of a turn; within 31 bits. The first turn of a rollout has its sample's seed."""
    return derived_seed(seed, "turn", branch, turn) & 0x7FFFFFFF if branch or turn else seed


def derived_seed(seed: int, *parts: str | int) -> int:
    """A seed of `SEED_BITS` bits for one purpose of a run."""
    return int(digest("seed", seed, *parts), 16) & ((1 << SEED_BITS) - 1)


def sample_seed(seed: int, iteration: int, prompt: str, ordinal: int, index: int) -> int:
    """Sampling seed of sample `index` of a draw; within 31 bits, as engines take it.

    `prompt` and `ordinal` name the draw, as for `group_id`. No seed of a run depends on the run's name.
    """
    place = sample_id(group_id("", iteration, prompt, ordinal), index)
    return derived_seed(seed, "sample", place) & 0x7FFFFFFF


def iteration_number(index: int) -> int:
    """How people count iterations: from 1. Folders, columns and code keep the index, from 0."""
    return index + 1


def run_identity(name: str, folder: str, run_id: str) -> str:
    """The name of a run's actors, placement group, shared memory and temporary folders, unique to one run folder.

    A copied run folder has the same `run_id`, a run of the same name under another storage root the same `name`.
    """
    return f"{name}-{digest('run', folder, run_id)[:12]}"
