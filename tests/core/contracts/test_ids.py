"""Ids and seeds: the same for good, and different for different things."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.contracts import ids

part = st.one_of(st.text(max_size=6), st.integers())


@given(st.lists(part, max_size=4), st.lists(part, max_size=4))
def test_different_parts_have_different_digests(one: list[str | int], other: list[str | int]) -> None:
    assert (ids.digest(*one) == ids.digest(*other)) == (one == other)


def test_ids_and_seeds_are_the_same_for_good() -> None:
    """A run may go on under another release: a regenerated sample must stay the same sample."""
    prompt = ids.prompt_id("default", 7, '"2 + 2 ="')
    group = ids.group_id("run", 3, prompt, 5)
    sample = ids.sample_id(group, 2)
    assert prompt == "02cb901c961b1eaa59db324d894303af"
    assert group == "1cc766646182be87a45821e0b73cc6f7"
    assert sample == "1cc766646182be87a45821e0b73cc6f7-0002"
    assert ids.sample_seed(0, 3, prompt, 5, 2) == 24532868
    assert ids.derived_seed(0, "epoch", "default", 1) == 952782787838147960


@given(st.integers(0, 2**31 - 1), st.text(max_size=40))
def test_sampling_seeds_fit_what_engines_take(seed: int, prompt: str) -> None:
    assert 0 <= ids.sample_seed(seed, 0, prompt, 0, 0) < 2**31


def test_every_sample_has_a_seed_of_its_own() -> None:
    """Each part of its place changes it."""
    places = [(0, 1, "p", 2, 3), (1, 1, "p", 2, 3), (0, 2, "p", 2, 3), (0, 1, "q", 2, 3), (0, 1, "p", 3, 3)]
    assert len({ids.sample_seed(*place) for place in [*places, (0, 1, "p", 2, 4)]}) == 6


def test_people_count_iterations_from_one() -> None:
    assert [ids.iteration_number(index) for index in range(3)] == [1, 2, 3]
