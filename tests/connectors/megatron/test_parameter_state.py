"""Where the parameters of a distributed optimizer lie, which rank saves each, and the memory that copies go to."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.connectors.trainers.checkpoint.host_copy import HostMemory
from millrace.connectors.trainers.megatron.optim.parameter_state import ParameterSlice, owners_of, pieces_of

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def placed(sizes: list[int], ranks: int, bucket_start: int) -> tuple[list[list[ParameterSlice]], int]:
    """The pieces of parameters that lie one after another in a bucket, and the share of a rank."""
    share = -(-sum(sizes) // ranks)
    start, pieces = bucket_start, []
    for size in sizes:
        pieces.append(pieces_of(start, start + size, bucket_start, share))
        start += size
    return pieces, share


@given(SIZES, st.integers(1, 8), st.integers(0, 100))
def test_pieces_of_a_parameter_are_all_of_it_in_the_order_of_ranks(
    sizes: list[int], ranks: int, bucket_start: int
) -> None:
    for size, pieces in zip(sizes, placed(sizes, ranks, bucket_start)[0], strict=True):
        assert [piece.start for piece in pieces] == [0, *[piece.end for piece in pieces[:-1]]]
        assert pieces[-1].end == size
        assert all(piece.size for piece in pieces)
        assert [piece.rank for piece in pieces] == list(range(pieces[0].rank, pieces[-1].rank + 1))
        assert pieces[-1].rank < ranks


@given(SIZES, st.integers(1, 8))
def test_each_rank_holds_its_share_and_no_more(sizes: list[int], ranks: int) -> None:
    pieces, share = placed(sizes, ranks, 0)
    held = [0] * ranks
    for of_one in pieces:
        for piece in of_one:
            held[piece.rank] += piece.size
    assert max(held) <= share


@given(st.lists(SIZES, min_size=1, max_size=6), st.integers(1, 8))
def test_an_owner_holds_a_piece_and_none_owns_more_than_its_share_and_one_parameter(
    buckets: list[list[int]], ranks: int
) -> None:
    everything = [pieces for sizes in buckets for pieces in placed(sizes, ranks, 0)[0]]
    owners = owners_of(everything)
    owned = Counter[int]()
    for pieces, owner in zip(everything, owners, strict=True):
        assert owner in [piece.rank for piece in pieces]
        owned[owner] += pieces[-1].end
    whole = Counter[int]()
    for pieces in everything:
        if len(pieces) == 1:
            whole[pieces[0].rank] += pieces[0].size
    if ranks == 2:  # with more, a rank may hold pieces of few parameters
        cut = max((pieces[-1].end for pieces in everything if len(pieces) > 1), default=0)
        assert abs(owned[0] - owned[1]) <= max(cut, abs(whole[0] - whole[1]))


def test_parameters_that_are_cut_in_halves_go_to_each_rank_in_turn() -> None:
    halves = [pieces_of(0, 8, 0, 4) for _ in range(4)]
    assert owners_of(halves) == [0, 1, 0, 1]
    assert owners_of([*halves, pieces_of(0, 8, 0, 8)]) == [
        1,
        0,
        1,
        0,
        0,
    ]  # the last is the first rank's anyway


def test_of_a_large_model_no_rank_of_four_saves_much_more_than_its_share() -> None:
    """Qwen3-4B's parameters in megatron's buckets of 40 million."""
    layer = [2560, 6144 * 2560, 128, 128, 4096 * 2560, 2560, 2 * 9728 * 2560, 9728 * 2560]
    parameters = [151936 * 2560, *layer * 36, 2560]
    buckets: list[list[int]] = [[]]
    for size in reversed(parameters):
        if sum(buckets[-1]) >= 40_000_000:
            buckets.append([])
        buckets[-1].append(size)
    everything = [pieces for sizes in buckets for pieces in placed(sizes, 4, 0)[0]]
    owned = Counter[int]()
    for pieces, owner in zip(everything, owners_of(everything), strict=True):
        owned[owner] += pieces[-1].end
    assert max(owned.values()) < 1.1 * sum(parameters) / 4


def test_a_copy_finds_the_memory_that_was_prepared_and_a_larger_one_gets_more() -> None:
    memory = HostMemory()
    memory.prepare(8192, pinned=False)
    view = memory.take(4096, pinned=False)
    assert len(view) == 8192
    torch.frombuffer(view, dtype=torch.uint8).fill_(7)
    descriptor = memory.descriptor
    assert memory.take(8192, pinned=False) is view
    del view
    assert len(memory.take(16384, pinned=False)) == 16384
    assert memory.descriptor >= 0
    assert descriptor >= 0
    memory.close()
    assert memory.descriptor == -1
