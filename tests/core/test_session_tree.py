"""The tree of a rollout: whatever is generated, observed and branched, each token that was generated is trained once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.sessions.tree import BranchReward, RolloutTree, Segment, inherited

# an action on a branch, chosen by a number: a turn of so many tokens, observed tokens, or a branch of its own
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["turn", "observe", "branch", "fresh"]), st.integers(0, 9), st.integers(1, 5)),
    max_size=30,
)


def segment(first: int, count: int, version: int = 3) -> Segment:
    return Segment(list(range(first, first + count)), [-0.1 * n for n in range(count)], [(0, version)])


@given(ACTIONS)
def test_each_generated_token_is_trained_once_and_no_other(actions: list[tuple[str, int, int]]) -> None:
    tree, made, token = RolloutTree([1, 2]), Counter[int](), 1000
    for what, at, count in actions:
        branch = tree.branches[at % len(tree.branches)]
        if what == "turn":
            branch.add(segment(token, count))
            made.update(range(token, token + count))
            token += count
        elif what == "observe":
            branch.observe(list(range(token, token + count)))
            token += count
        else:
            prompt = [token] if what == "fresh" else None
            tree.branch(len(tree.branches), branch.number, branch.turns, prompt_ids=prompt)
            token += 1
    trained = Counter(
        token
        for branch in tree.samples()
        for token, mask in zip(branch.response_ids, branch.loss_mask, strict=True)
        if mask
    )
    assert trained == made
    for branch in tree.branches:
        assert len(branch.response_ids) == len(branch.loss_mask) == len(branch.logprobs)
        if branch.spans:
            assert branch.spans[0]["first_token"] == 0
        origin = branch.parent
        if (
            origin is not None and branch.prompt_ids[0] == 1
        ):  # what its parent held then stands at its beginning
            held = tree[origin].ids_after(branch.parent_turns)
            assert branch.prompt_ids[: len(held)] == held


def test_a_branch_begins_where_its_parent_stood_then_and_trains_nothing_of_it() -> None:
    tree = RolloutTree([1])
    tree[0].add(segment(10, 2))
    tree[0].observe([5])
    tree[0].add(segment(20, 1))
    early, late = tree.branch(1, 0, 1), tree.branch(2, 0, 2, "critic")
    assert (early.prompt_ids, late.prompt_ids) == ([1, 10, 11], [1, 10, 11, 5, 20])
    assert (early.name, late.name) == (None, "critic")
    late.observe([6])
    late.add(segment(30, 1))
    assert tree.branch(3, 2, 1).name == "critic"
    assert [branch.number for branch in tree.samples()] == [0, 2]
    assert (late.prompt_ids[-1], late.response_ids, late.loss_mask) == (6, [30], [1])


def test_versions_are_told_apart_and_observed_tokens_count_to_the_one_before() -> None:
    tree = RolloutTree([1])
    tree[0].add(segment(10, 2, version=3))
    tree[0].observe([5, 5])
    tree[0].add(Segment([11, 12], [-1.0, -1.0], [(0, 3), (1, 4)]))
    assert tree[0].spans == [{"first_token": 0, "version": 3}, {"first_token": 5, "version": 4}]
    assert tree[0].loss_mask == [1, 1, 0, 0, 1, 1]
    assert tree[0].logprobs[2:4] == [0.0, 0.0]


@pytest.mark.parametrize(
    "wrong", [Segment([1, 2], [-1.0], [(0, 3)]), Segment([1], [-1.0], []), Segment([1], [-1.0], [(1, 3)])]
)
def test_tokens_without_a_log_probability_or_a_version_are_refused(wrong: Segment) -> None:
    with pytest.raises(ValueError, match="log-probabilities and weight versions"):
        RolloutTree([1])[0].add(wrong)


def test_a_branch_without_a_reward_has_that_of_the_one_it_began_from() -> None:
    tree = RolloutTree([1])
    for number, parent in ((1, 0), (2, 1), (3, 0)):
        tree.branch(number, parent, 0)
    given_ = {0: BranchReward(1.0), 3: BranchReward(0.5, {"part": 1.0})}
    assert {number: reward.value for number, reward in inherited(tree, given_).items()} == {
        0: 1.0,
        1: 1.0,
        2: 1.0,
        3: 0.5,
    }
    assert inherited(tree, {2: BranchReward(2.0)}).keys() == {2}
