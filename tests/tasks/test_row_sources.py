"""Rows of stored tables in one order: all of them, in pieces, whatever stays in memory."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millrace.tasks.batching import row_sources
from millrace.tasks.batching.row_sources import RowSources


def table_of(source: int) -> pa.Table:
    rows = np.arange(20) + 100 * source
    return pa.table({"name": rows, "tokens": [[int(row)] * (row % 7) for row in rows]})


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("piece_tokens", [1, 10, 1 << 20])
def test_rows_come_in_the_order_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, piece_tokens: int
) -> None:
    monkeypatch.setattr(row_sources, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(row_sources, "PIECE_TOKENS", piece_tokens)
    reads: list[int] = []
    sources = RowSources()

    def read(number: int) -> pa.Table:
        reads.append(number)
        return table_of(number)

    for number in range(5):
        assert sources.add(lambda number=number: read(number)) == number
    places = [(int(at) // 20, int(at) % 20) for at in np.random.default_rng(3).permutation(100)]
    wanted = [100 * source + row for source, row in places]
    tokens = [name % 7 for name in wanted]
    pieces = list(sources.pieces(places, tokens))
    assert [at for span, _ in pieces for at in range(span.start, span.stop)] == list(range(100))
    found = pa.concat_tables([piece for _, piece in pieces])
    assert found.column("name").to_pylist() == wanted
    assert found.column("tokens").to_pylist() == [[name] * (name % 7) for name in wanted]
    for span, piece in pieces:
        assert len(piece) == span.stop - span.start
        assert len(piece) == 1 or sum(map(len, piece.column("tokens").to_pylist())) <= piece_tokens
    if kept_bytes:
        assert sorted(reads) == list(range(5))  # each table was read once
    else:
        assert len(reads) > 5 or piece_tokens == 1 << 20  # one table at a time stays decoded


def test_no_rows_make_no_piece() -> None:
    assert list(RowSources().pieces([], [])) == []
