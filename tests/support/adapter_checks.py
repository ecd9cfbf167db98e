"""What both trainers' ranks with adapters must do, and the files that tests of them read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.plain_lora import add_pairs
from tests.support.plain_trainer import LR, Plain
from tests.support.trainer_ranks import RankFailedError, Workers, log_probabilities, samples

Config = dict[str, Any]  # of ranks


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder of adapters."""
    return load_file(folder / "adapter_model.safetensors")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model's folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def tensors_of_buckets(rank: Any) -> dict[str, torch.Tensor]:
    """The tensors that a rank sends to engines as version 1."""
    found, number, last = {}, 0, False
    while not last:
        bucket = rank.bucket(1, number, 1 << 14, False)
        flat = rank._stream.flat
        for name, shape, dtype, start, end in bucket.entries:
            found[name] = flat[start:end].clone().view(getattr(torch, dtype)).view(shape)
        number, last = number + 1, bucket.last
    rank.end_buckets()
    return found


def check_checkpoints_know_their_base(
    workers: Workers, adapted: Config, whole: Config, beside_others: Config, folder: Path
) -> None:
    """A checkpoint loads neither without adapters, nor into them if it has none, nor beside another model.

    adapted: a run with adapters; whole: without, of the same model; beside_others: with adapters, of another model.
    """
    with workers.group(adapted) as group:
        group.call("save", str(folder / "adapters"))
    with workers.group(whole) as group:
        group.call("save", str(folder / "whole"))
        with pytest.raises(RankFailedError, match=r"TrainerError.*holds adapters alone.*trainer.lora"):
            group.call("load", str(folder / "adapters"))
    with workers.group(adapted) as group, pytest.raises(RankFailedError, match="holds all weights"):
        group.call("load", str(folder / "whole"))
    with (
        workers.group(beside_others) as group,
        pytest.raises(RankFailedError, match=r"adapters belong to another model\.safetensors"),
    ):
        group.call("load", str(folder / "adapters"))


def check_next_step(
    workers: Workers, configs: Mapping[str, Config], batch: str, folder: Path, step: int, expected: Config
) -> None:
    """After the load of folder/checkpoint, a step is what it was without a stop: folder/straight, and the figures `expected`.

    configs: that of the ranks that saved it, whose step has the same bits, then those of other ranks; by a name of each.
    """
    straight = adapters(folder / "straight")
    for number, config in enumerate(configs.values()):
        with workers.group(config) as group:
            assert set(group.call("load", str(folder / "checkpoint"))) == {step - 1}
            again = group.train([step], batch.format(step))[0]
            group.call("export", str(folder / str(number)), step)
        exact = number == 0
        for name in ("loss", "grad_norm", "kl"):
            wanted = expected[name]
            assert again[name] == (wanted if exact else pytest.approx(wanted, rel=1e-4, abs=1e-6))
        for name, tensor in adapters(folder / str(number)).items():
            other = straight[name]
            assert torch.equal(tensor, other) if exact else float((tensor - other).abs().mean()) < LR / 100


def check_what_goes_out(
    workers: Workers, config: Config, started: Config, model: Path, batch: str, folder: Path
) -> None:
    """After a step, merged weights are the base's plus the pairs, in files and on their way to engines; pairs start another run.

    config: of the ranks that make the step. started: of others, with folder/adapters as trainer.lora.path and a KL coefficient.
    """
    with workers.group(config) as group:
        group.train([1], batch.format(1))
        group.call("export", str(folder / "adapters"), 1)
        group.call("export", str(folder / "merged"), 1, merged=True)
        group.call("upload", str(folder / "uploaded"), 1)
        sent = group.run(tensors_of_buckets)[0]
        scores = group.run(log_probabilities, batch.format(2))[0]
    files = [sorted(path.name for path in (folder / name).iterdir()) for name in ("adapters", "uploaded")]
    assert files[0] == files[1]
    uploaded = adapters(folder / "uploaded")
    assert all(torch.equal(uploaded[name], tensor) for name, tensor in adapters(folder / "adapters").items())
    plain = Plain(model)
    pairs = add_pairs(plain.model, folder / "adapters")
    base, merged = tensors(model), tensors(folder / "merged")
    assert merged.keys() == base.keys()
    assert {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])} == {
        f"{name}.weight" for name in pairs
    }
    for name, pair in pairs.items():
        weight = base[f"{name}.weight"]
        assert torch.allclose(merged[f"{name}.weight"], weight + pair.scale * pair.B @ pair.A, atol=1e-6)
    assert sent.keys() == merged.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in merged.items())
    with torch.no_grad():
        for row in samples(2):
            assert scores[row["sample_id"]] == pytest.approx(plain.logprobs(row).tolist(), abs=2e-5)
    with workers.group(started) as group:
        again = group.run(log_probabilities, batch.format(2))[0]
        first = group.train([1], batch.format(1))[0]
    assert first["kl"] == 0  # of the policy before the first step
    for name, values in scores.items():
        assert again[name] == pytest.approx(values, abs=2e-5)
