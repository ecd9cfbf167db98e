"""Where the parameters of a distributed optimizer lie, which rank saves each, and the memory that copies go to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.connectors.megatron.checkpoint.host_copy import HostMemory
from millrace.connectors.megatron.optim.parameter_state import Piece, owner_of, pieces_of

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def placed(sizes: list[int], ranks: int, bucket_start: int) -> tuple[list[list[Piece]], int]:
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


@given(SIZES, st.integers(1, 8))
def test_the_owner_holds_most_of_a_parameter(sizes: list[int], ranks: int) -> None:
    for pieces in placed(sizes, ranks, 0)[0]:
        owned = next(piece for piece in pieces if piece.rank == owner_of(pieces))
        assert owned.size == max(piece.size for piece in pieces)


def test_of_two_halves_the_first_rank_is_the_owner() -> None:
    assert owner_of(pieces_of(2, 6, 0, 4)) == 0


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
