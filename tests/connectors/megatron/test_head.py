"""The head at vocabularies above one block of its kernels: against float64, and whole steps against Hugging Face.

The kernels run in Triton's interpreter where Triton is; tests/gpu runs them compiled.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.megatron.test_parity import policy_loss
from tests.support.plain_trainer import Plain
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Workers, configuration, samples

ROOT = Path(__file__).parents[3]
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
VOCABULARY = 4097  # one more than a block; odd, so that two ranks hold a row of padding
NORMS = 1e-4  # torch's norm in fp32 on a CPU is that far off for tensors of this size, cut or whole
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
}


@pytest.mark.parametrize("ranks", slow_but([1, 2], 1))
@pytest.mark.parametrize("form", ["plain", pytest.param("interpreted", marks=NEEDS_TRITON)])
def test_values_and_gradients_are_those_of_float64(form: str, ranks: int) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.support.head_checks", form, str(ranks)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == (6 if form == "interpreted" else 12) * ranks


@pytest.mark.parametrize(
    ("layout", "tied"),
    slow_but(product(LAYOUTS, [False, True]), ("one rank", False), ("tensor", False), ("pipeline", True)),
)
def test_steps_of_a_large_vocabulary_are_those_of_plain_torch(
    workers: Workers, model: Callable[..., Path], batch: str, layout: str, tied: bool
) -> None:
    """Tied over two stages, the embedding and the head are two copies, whose gradients are one sum."""
    folder = model(vocab_size=VOCABULARY, tie_word_embeddings=tied)
    world, parallel = LAYOUTS[layout]
    config = configuration(folder, world, parallel=parallel)
    with workers.group(config) as group:
        ours = [group.train([step], batch.format(step))[0] for step in (1, 2)]
    plain = Plain(folder)
    for step, found in enumerate(ours, start=1):
        loss = policy_loss(plain, samples(step), {}, 0.0)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-6)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=NORMS)
