"""The plain example runs, and its advantages are those of the library. Losses and steps are compared in connectors/trainers/megatron/test_parity.py."""

from __future__ import annotations

import re

import pytest
import torch

from examples import plain_rl
from millrace.core.algorithms.group_advantages import group_relative


def test_it_runs_and_prints_what_was_learned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WARM_UP_STEPS": 2, "ITERATIONS": 5, "P": 2, "G": 4}.items():
        monkeypatch.setattr(plain_rl, name, value)
    plain_rl.main()
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"iteration 5 of 5: mean reward \d\.\d{3}", first)
    assert re.fullmatch(r"held-out accuracy \d\.\d{3} -> \d\.\d{3}", last)


def test_its_advantages_are_the_librarys() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 2.5, 1.0]])
    groups_B = torch.arange(3).repeat_interleave(4)
    found = plain_rl.group_advantages(rewards_PG).flatten()
    torch.testing.assert_close(found, group_relative(rewards_PG.flatten(), groups_B))
    assert torch.equal(found[4:8], torch.zeros(4))


def test_what_follows_the_end_of_a_response_is_masked() -> None:
    class Ends:
        """Says 7, then the end, whatever stood before."""

        def __call__(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            logits = torch.full((*tokens_BT.shape, len(plain_rl.VOCAB)), -1e9)
            said = plain_rl.VOCAB.index("7" if tokens_BT.shape[1] == 6 else ".")
            logits[..., said] = 0.0
            self.logits = logits
            return self  # type: ignore[return-value]

    tokens_BT, mask_BR, _ = plain_rl.sample(Ends(), plain_rl.encode([plain_rl.prompt(3, 4)]))
    assert plain_rl.decode(tokens_BT) == ["03+04=7..."]
    assert mask_BR.tolist() == [[1, 1, 0, 0]]
    assert plain_rl.reward("03+04=7...", "7") == 1.0
    assert plain_rl.reward("03+04=77..", "7") == 0.0
