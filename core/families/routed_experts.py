"""The experts that an engine's routers chose, token by token: how they are stored, and what a valid row is. Pure.

Rollout routing replay (arXiv:2510.11370): the trainer's passes over a sample use the experts that the engine used. A row belongs to
one token that the engine was fed: for each layer with experts, the numbers of the token's experts. The rows of a sample are those
of its first tokens, without a gap. The token that was sampled last was never fed, so it has no row.

    token   t0  t1  t2 | t3  t4  t5      three of a prompt, three sampled
    row     r0  r1  r2 | r3  r4  -       r2 is of the pass that sampled t3
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.core.families.architecture import Architecture

Rows = npt.NDArray[Any]  # [rows, layers with experts, experts of a token], uint8 or uint16
WIRE = np.dtype("<i4")  # SGLang's numbers


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """Rows of neighbouring tokens, in their stored form."""

    width: int  # bytes of a row
    data: bytes

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.data) // self.width

    def then(self, more: RoutedRows) -> RoutedRows:
        """These rows and the rows of the tokens after them."""
        return RoutedRows(self.width, self.data + more.data)

    def last(self, count: int) -> RoutedRows:
        """The last `count` rows."""
        return RoutedRows(self.width, self.data[max(0, self.count - count) * self.width :])

    def without_last(self, count: int) -> RoutedRows:
        """All but the last `count` rows."""
        return RoutedRows(self.width, self.data[: max(0, self.count - count) * self.width])


@dataclass(frozen=True)
class RoutingFormat:
    """The form of a model's rows."""

    layers: int  # all layers of the model
    expert_layers: tuple[int, ...]  # numbers of the layers with experts
    experts: int  # of such a layer
    used: int  # experts of a token

    @classmethod
    def of(cls, model: Architecture) -> RoutingFormat | None:
        """The form of this model's rows; None for a model without experts."""
        if not model.experts:
            return None
        return cls(model.layers, model.expert_layers, model.experts, model.experts_used)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored type: the smallest that holds the number of every expert."""
        return np.dtype("u1" if self.experts <= 256 else "<u2")

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return len(self.expert_layers) * self.used * self.dtype.itemsize

    def from_engine(self, text: Any, rows: int) -> RoutedRows:
        """Parse what an engine answers: base64 of int32 [rows, all layers, experts of a token], with zeros for dense layers.

        Raises ValueError unless it has this number of rows, each with valid experts.
        """
        if not isinstance(text, str):
            raise ValueError("the answer has no routed experts")
        try:
            raw = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"its routed experts are not base64: {error}") from error
        row = self.layers * self.used * WIRE.itemsize
        if len(raw) != rows * row:
            raise ValueError(
                f"its routed experts have {len(raw)} bytes; {rows} rows of {self.layers} layers, {self.used} experts each, "
                f"have {rows * row}"
            )
        numbers = np.frombuffer(raw, WIRE).reshape(rows, self.layers, self.used)
        self._check_range(numbers)
        stored = numbers[:, list(self.expert_layers)].astype(self.dtype)
        self._check_different(stored)
        return RoutedRows(self.width, stored.tobytes())

    def to_engine(self, rows: Sequence[npt.NDArray[Any]]) -> str:
        """What an engine answers for rows, each of numbers [layers with experts, experts of a token]."""
        numbers = np.zeros((len(rows), self.layers, self.used), WIRE)
        if len(rows):
            numbers[:, list(self.expert_layers)] = np.stack(rows)
        return base64.b64encode(numbers.tobytes()).decode()

    def read(self, data: bytes, tokens: int, needed: int) -> Rows:
        """A sample's stored rows. tokens: its length; needed: its tokens that a token with a loss follows.

        Raises ValueError unless there is a row for each needed token, none without a token, and no expert that does not exist.
        """
        if len(data) % self.width:
            raise ValueError(f"{len(data)} bytes are no rows of {self.width} bytes")
        count = len(data) // self.width
        if not needed <= count < max(1, tokens):
            raise ValueError(f"{count} rows for {tokens} tokens, of which {needed} need one")
        rows = np.frombuffer(data, self.dtype).reshape(count, len(self.expert_layers), self.used)
        self._check_range(rows)
        return rows

    def _check_range(self, rows: Rows) -> None:
        """Raise ValueError if a row names an expert that the model does not have."""
        if rows.size and not (rows.min() >= 0 and rows.max() < self.experts):
            at = tuple(np.argwhere((rows < 0) | (rows >= self.experts))[0])
            raise ValueError(f"row {at[0]} has expert {rows[at]}, and a layer has {self.experts}")

    def _check_different(self, rows: Rows) -> None:
        """Raise ValueError if a row names an expert twice, as rows do that an engine never filled: they are zeros."""
        # columns are compared ten times as fast
        by_place = np.ascontiguousarray(rows.reshape(-1, self.used).T)
        for one, other in combinations(by_place, 2):
            same = one == other
            if same.any():
                row, layer = divmod(int(same.argmax()), len(self.expert_layers))
                raise ValueError(
                    f"row {row} has the experts {rows[row, layer].tolist()} in layer {self.expert_layers[layer]}, "
                    "one of them twice"
                )
