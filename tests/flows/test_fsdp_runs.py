"""Whole runs with FSDP's trainer: killed, started again, replayed, with the same samples and weights as an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from millrace.connectors.huggingface.tiny import build_tiny_model
from tests.support.flow_runs import Workplace, exported, failures, generated, trained, undisturbed

GAP = 1e-5  # nats a token, of float32


def build(folder: Path, family: str) -> None:
    """The tiny model, or one of a family that core.families does not know, with its tokenizer."""
    import transformers

    build_tiny_model(folder, tie_word_embeddings=False)
    if family == "gemma3":
        own = transformers.AutoConfig.from_pretrained(folder)
        config = transformers.Gemma3TextConfig(
            vocab_size=own.vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=own.max_position_embeddings,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
            bos_token_id=own.bos_token_id,
        )
        transformers.set_seed(0)
        transformers.Gemma3ForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_run_trains_with_fsdp_and_goes_on_after_a_stop(
    workplace: Workplace, tmp_path: Path, family: str
) -> None:
    build(tmp_path / "model", family)
    here = ["trainer.kind=fsdp", f"model.path={tmp_path}/model", f"sync.max_logprob_gap={GAP}"]
    plain = tmp_path / "plain"
    undisturbed(workplace, plain, here, tmp_path / "model", GAP)

    stopped = tmp_path / "stopped"
    beside = ["checkpoint.background=true", "sync.kind=broadcast", "sync.bucket_mib=1"]
    process = workplace.train(stopped, *here, *beside, "run.iterations=2")
    assert "2 iterations complete, 2 of them now" in process
    assert "3 iterations complete, 1 of them now" in workplace.train(stopped, *here, *beside)
    assert trained(stopped / "a") == trained(plain / "a")
    assert exported(stopped / "a", 3) == exported(plain / "a", 3)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(workplace: Workplace, tmp_path: Path) -> None:
    """Sums of gradients round differently then, and nothing else differs. One of the runs is killed between the two."""
    here = ["trainer.kind=fsdp", f"sync.max_logprob_gap={GAP}"]
    for root, ranks in (("same", 2), ("grown", 1)):
        workplace.train(tmp_path / root, *here, f"trainer.world_size={ranks}", "run.iterations=2")
        workplace.train(tmp_path / root, *here, "trainer.world_size=2")
        replayed = workplace.call("replay", "a", "--root", str(tmp_path / root), "--from", "2", "--to", "3")
        assert "every weight equals the export after iteration 3, bit for bit" in replayed
    third = tmp_path / "shrunk/a/iterations/000002/prompts.parquet"
    shared = ["trainer.world_size=2", "trainer.parallel.context=2"]
    workplace.train_and_kill(tmp_path / "shrunk", third.exists, *here, *shared)
    assert "3 iterations complete" in workplace.train(tmp_path / "shrunk", *here, "trainer.world_size=1")
    same, *others = (tmp_path / root / "a" for root in ("same", "grown", "shrunk"))
    weights = load(exported(same, 3))
    for other in others:
        assert trained(other) == trained(same)
        found = load(exported(other, 3))
        for name, tensor in weights.items():
            # a hundredth of the learning rate, which is what AdamW moves a weight by, however small its gradient
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-5), (other, name)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["merged", "names"])
def test_a_killed_run_with_adapters_ends_alike_and_is_replayed(
    workplace: Workplace, tmp_path: Path, way: str
) -> None:
    lora = ["trainer.lora={rank: 4, alpha: 8}", "algorithm.kl_coef=0.05", f"sync.lora={way}"]
    here = ["trainer.kind=fsdp", "trainer.world_size=2", "trainer.device=cpu", "engines.kind=embedded"]
    whole, killed = (tmp_path / root / "a" for root in ("whole", "killed"))
    out = workplace.train(tmp_path / "whole", *here, *lora, f"sync.max_logprob_gap={GAP}")
    assert not failures(whole), out
    step = killed / "iterations/000002/step.json"
    workplace.train_and_kill(tmp_path / "killed", step.exists, *here, *lora)
    workplace.call("stop", "a", "--root", str(tmp_path / "killed"))  # ranks are rebuilt from the checkpoint
    workplace.train(tmp_path / "killed", *here, *lora)
    assert trained(killed) == trained(whole)
    assert max(generated(killed).values()) == 1
    adapters = "exports/000003/adapter_model.safetensors"
    assert (killed / adapters).read_bytes() == (whole / adapters).read_bytes()
    for root in ("whole", "killed"):
        told = workplace.call("replay", "a", "--root", str(tmp_path / root), "--from", "0", "--to", "3")
        assert "bit for bit" in told
