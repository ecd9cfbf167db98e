"""A whole run with another trainer than megatron-core: `trainer.rank` names a class of tests/support/bigram_rank.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.connectors.huggingface.tiny import build_tiny_model
from tests.support.flow_runs import Workplace, exported, trained, undisturbed

RANK = "tests.support.bigram_rank:BigramRank"
GAP = 1e-5  # nats a token, of float32


@pytest.mark.slow
def test_a_run_takes_any_trainer_whose_ranks_keep_the_contract(workplace: Workplace, tmp_path: Path) -> None:
    """Its engines serve what it trained, by each way that a CPU has; its checkpoints and its replay are the run's own."""
    build_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    repository = Path(__file__).parents[2]
    named = [f"run.import_from=['{repository}']", f"trainer.rank={RANK}", "trainer.optimizer.lr=1"]
    here = [*named, f"model.path={tmp_path}/model", f"sync.max_logprob_gap={GAP}"]
    plain = tmp_path / "plain"
    out = undisturbed(workplace, plain, here, tmp_path / "model", GAP)
    assert "from checkpoint 2" in out

    sent = tmp_path / "sent"
    beside = ["trainer.world_size=2", "sync.kind=broadcast", "sync.bucket_mib=1", "sync.max_prompt_gap=1e-4"]
    process = workplace.train(sent, *here, *beside, "run.iterations=2", "checkpoint.background=true")
    assert "2 iterations complete, 2 of them now" in process
    assert "3 iterations complete, 1 of them now" in workplace.train(sent, *here, *beside)
    assert trained(sent / "a") == trained(plain / "a")
    assert exported(sent / "a", 3) == exported(plain / "a", 3)
