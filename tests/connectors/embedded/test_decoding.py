"""A token at a time over the cache gives what the whole text gives, for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.connectors.engines.embedded.model import (
    ROWS,
    Cache,
    Decoder,
    Weights,
    read_shape,
    read_tensors,
)
from millrace.core.families.registry import BUILT_IN
from tests.support.tiny_models import save_tiny_model

LENGTH, PLACES = 32, 12  # of the text; of them by one token at a time, more than the window
KINDS: dict[str, dict[str, Any]] = {family.name: {} for family in BUILT_IN} | {
    "mistral": {"sliding_window": 5}
}


@pytest.mark.parametrize("family", KINDS)
def test_a_token_at_a_time(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(tmp_path, family, 37, **KINDS[family])
    shape = read_shape(folder)
    decoder = Decoder(Weights(shape, read_tensors(folder, shape, None)))
    tokens = torch.arange(LENGTH) * 7 % 37
    expected, _, _ = decoder.prefill(tokens[None])
    cache = Cache(shape, ROWS, 64, torch.float32)
    for place in range(PLACES):
        one, _ = decoder.decode(tokens[place].repeat(ROWS), torch.full((ROWS,), place), cache)
        torch.testing.assert_close(one, expected[0, place].expand_as(one), atol=1e-5, rtol=0)
