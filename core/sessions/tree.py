"""The tokens of one rollout as a tree of branches: prompts, generated tokens, and the samples made of them. Pure.

Owns that no token is generated or trained twice: a branch starts with its parent's tokens at that time as its prompt, and owns
only tokens generated in it. Knows nothing of engines, texts or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.core.contracts.sample import PolicySpan


@dataclass(frozen=True)
class Segment:
    """Tokens that one engine generated in one attempt."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[int, int]]  # first token of the segment, weight version
    # stored experts of the tokens since the branch's, up to the one before the segment's last
    routed: bytes = b""


@dataclass
class Branch:
    """A branch of the tree. `prompt_ids` are not generated in it: the prompt, or its parent's tokens when it started."""

    number: int
    prompt_ids: list[int]
    parent: int | None = None
    parent_turns: int | None = None
    name: str | None = None
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[PolicySpan] = field(default_factory=list)
    routed: bytes = b""  # stored experts of its first tokens, up to the one before the last generated one
    cuts: list[int] = field(default_factory=list)  # number of response tokens after each turn
    first_ids: list[int] = field(init=False)  # tokens before the first observation
    events: int = 0  # number of turns and calls
    # tokens before the dialogue that it continues; None: it started its own dialogue
    dialogue_from: int | None = None
    _routed_after: list[int] = field(default_factory=list)  # bytes of `routed` after each turn

    def __post_init__(self) -> None:
        self.first_ids = list(self.prompt_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens so far: the start of the next turn's prompt."""
        return [*self.prompt_ids, *self.response_ids]

    @property
    def dialogue_begins(self) -> int:
        """Tokens of the prompt of its dialogue, in the first of the branches that it continues."""
        return len(self.prompt_ids) if self.dialogue_from is None else self.dialogue_from

    @property
    def turns(self) -> int:
        """Turns that were generated here."""
        return len(self.cuts)

    def ids_after(self, turns: int) -> list[int]:
        """All tokens after this number of turns."""
        if not turns:
            return list(self.first_ids)
        return [*self.prompt_ids, *self.response_ids[: self.cuts[turns - 1]]]

    def routed_after(self, turns: int) -> bytes:
        """The stored experts after this number of turns. Those of a prompt are left out: until its first turn it may still change."""
        return self.routed[: self._routed_after[turns - 1]] if turns else b""

    @property
    def generated(self) -> int:
        """Number of tokens that the policy generated here."""
        return sum(self.loss_mask)

    def observe(self, ids: Sequence[int]) -> None:
        """Add tokens that are not trained. Before the first turn they belong to the prompt."""
        if self.turns:
            self.response_ids += ids
            self.loss_mask += [0] * len(ids)
            self.logprobs += [0.0] * len(ids)
        else:
            self.prompt_ids += ids

    def forget(self, length: int) -> None:
        """Remove observed tokens beyond this total length."""
        kept = max(length - len(self.prompt_ids), self.cuts[-1] if self.cuts else 0)
        del self.response_ids[kept:], self.loss_mask[kept:], self.logprobs[kept:]

    def add(self, segment: Segment) -> None:
        """Add a turn that was generated. Raises ValueError unless each token has a log-probability and a weight version."""
        count = len(segment.output_ids)
        if len(segment.logprobs) != count or (count and (not segment.spans or segment.spans[0][0] != 0)):
            raise ValueError(
                f"{count} tokens with {len(segment.logprobs)} log-probabilities and weight versions {list(segment.spans)}"
            )
        first = len(self.response_ids)
        for start, version in segment.spans:
            if not self.spans or self.spans[-1]["version"] != version:
                # observed tokens before the segment count to the version that continues
                self.spans.append({"first_token": first + start if self.spans else 0, "version": version})
        self.response_ids += segment.output_ids
        self.loss_mask += [1] * count
        self.logprobs += segment.logprobs
        self.routed += segment.routed
        self._routed_after.append(len(self.routed))
        self.cuts.append(len(self.response_ids))


class RolloutTree:
    """The branches of one rollout. Number 0 starts at the prompt."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._branches = {0: Branch(0, list(prompt_ids))}

    def __getitem__(self, number: int) -> Branch:
        return self._branches[number]

    def __contains__(self, number: int) -> bool:
        return number in self._branches

    @property
    def branches(self) -> list[Branch]:
        """All branches, by number."""
        return [self._branches[number] for number in sorted(self._branches)]

    def branch(
        self,
        number: int,
        parent: int,
        parent_turns: int,
        name: str | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Branch:
        """A new branch that starts from `parent` after some of its turns, or from its own prompt."""
        assert number not in self._branches, f"branch {number} is there"
        origin = self._branches[parent]
        made = Branch(
            number,
            origin.ids_after(parent_turns) if prompt_ids is None else list(prompt_ids),
            parent,
            parent_turns,
            origin.name if name is None else name,
            dialogue_from=origin.dialogue_begins if prompt_ids is None else None,
            routed=origin.routed_after(parent_turns) if prompt_ids is None else b"",
        )
        self._branches[number] = made
        return made

    def samples(self) -> list[Branch]:
        """The branches that become samples: the first, and all branches with generated tokens."""
        return [branch for branch in self.branches if branch.number == 0 or branch.generated]


@dataclass(frozen=True)
class BranchReward:
    """The reward that a rollout gave a branch."""

    value: float
    parts: dict[str, float | str] = field(default_factory=dict)
    answer: str | None = None


def inherited(tree: RolloutTree, given: Mapping[int, BranchReward]) -> dict[int, BranchReward]:
    """The reward of each branch: its own, else its parent's."""
    found: dict[int, BranchReward] = {}
    for branch in tree.branches:
        own = given.get(branch.number)
        if own is None and branch.parent is not None:
            own = found.get(branch.parent)
        if own is not None:
            found[branch.number] = own
    return found
