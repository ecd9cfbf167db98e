"""The stream of weights to engines: every rank of every layout gets the very tensors of an export, within one bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.tensors import weight_tensors
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Group, Workers, configuration

SIZE = 4096
LAYOUTS: dict[str, tuple[str, int, dict[str, int | bool]]] = {
    "one rank": ("qwen3", 1, {}),
    "data": ("qwen3", 2, {}),
    "tensor": ("qwen3", 2, {"tensor": 2}),
    "pipeline": ("qwen3", 2, {"pipeline": 2}),
    "context": ("qwen3", 2, {"context": 2}),
    "tensor, data": ("qwen3", 4, {"tensor": 2, "sequence": True}),
    "tensor, pipeline": ("qwen3", 4, {"tensor": 2, "pipeline": 2}),
    "pipeline, context": ("qwen3", 4, {"pipeline": 2, "context": 2}),
    "experts on one rank": ("qwen3_moe", 1, {}),
    "experts, tensor": ("qwen3_moe", 2, {"tensor": 2, "sequence": True}),
    "experts apart": ("qwen3_moe", 2, {"expert": 2}),
    "experts apart, tensor": ("qwen3_moe", 2, {"tensor": 2, "sequence": True, "expert": 2}),
    "experts, pipeline": ("qwen3_moe", 2, {"pipeline": 2}),
    "experts apart, tensor, data": ("qwen3_moe", 4, {"tensor": 2, "sequence": True, "expert": 2}),
    "tensor, a key head on each pair": ("qwen3", 4, {"tensor": 4, "sequence": True}),
    "experts, tensor apart": ("qwen3_moe", 2, {"expert_tensor": 2}),
    "experts apart, tensor of experts": (
        "qwen3_moe",
        4,
        {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2},
    ),
    "experts and tensor apart": ("qwen3_moe", 4, {"expert": 2, "expert_tensor": 2}),
    "experts apart, pipeline": ("qwen3_moe", 4, {"expert": 2, "pipeline": 2}),
}


def passed(rank: Any) -> list[tuple[dict[str, torch.Tensor], int, bool, int]]:
    """One pass on one rank: of each bucket its tensors, its bytes, whether it was said to be the last, the buffer's bytes."""
    found, number, last = [], 0, False
    while not last:
        bucket = rank.bucket(0, number, SIZE, False)
        flat, entries, last = rank._stream.flat, bucket.entries, bucket.last
        tensors = {
            name: flat[start:end].view(getattr(torch, dtype)).view(shape).clone()
            for name, shape, dtype, start, end in entries
        }
        found.append((tensors, bucket.size, last, rank._stream._buffer.numel()))
        number += 1
    rank.end_buckets()
    return found


def copied(rank: Any) -> set[str]:
    """What is not read where the parameters lie, by the last parts of the names."""
    from millrace.connectors.trainers.megatron.weights.hf_tensors import hf_tensors

    held = {parameter.untyped_storage().data_ptr() for parameter in rank.policy.parameters()}
    return {
        ".".join(name.split(".")[-2:])
        for name, tensor in hf_tensors(rank.policy, rank.hf)
        if tensor.untyped_storage().data_ptr() not in held
    }


def taken(rank: Any) -> list[str]:
    """Names of the tensors that a rank takes from a folder, once for each parameter."""
    from millrace.connectors.trainers.megatron.weights.hf_tensors import mapped_parameters

    return [name for _, mapping in mapped_parameters(rank.policy, rank.hf) for name in mapping.names]


@pytest.fixture(
    params=slow_but(LAYOUTS, "one rank", "tensor", "pipeline", "experts apart", "experts apart, tensor, data")
)
def ranks(request: Any, workers: Workers, model: Callable[..., Path]) -> Any:
    kind, world, parallel = LAYOUTS[request.param]
    with workers.group(configuration(model(kind), world, parallel=parallel)) as group:
        yield group


def test_every_rank_gets_every_tensor_of_an_export_once(ranks: Group, tmp_path: Path) -> None:
    ranks.call("export", str(tmp_path / "export"), 0)
    shape = architecture(read_hf_config(str(tmp_path / "export")))
    whole = weight_tensors(str(tmp_path / "export"), shape).keys()
    of_ranks = ranks.run(taken)
    assert {name for names in of_ranks for name in names} == whole
    assert all(len(names) == len(set(names)) for names in of_ranks)
    exported = {
        name: t for file in (tmp_path / "export").glob("*.safetensors") for name, t in load_file(file).items()
    }
    largest = max(tensor.nbytes for tensor in exported.values())
    for buckets in ranks.run(passed):
        names = [name for tensors, *_ in buckets for name in tensors]
        assert sorted(names) == sorted(exported)
        assert all(
            tensor.equal(exported[name]) for tensors, *_ in buckets for name, tensor in tensors.items()
        )
        assert [last for _, _, last, _ in buckets] == [False] * (len(buckets) - 1) + [True]
        for tensors, size, _, held in buckets:
            assert size == sum(tensor.nbytes for tensor in tensors.values())
            assert size <= SIZE or len(tensors) == 1
            assert held <= max(SIZE, largest)
        assert len(buckets) >= sum(tensor.nbytes for tensor in exported.values()) // max(SIZE, largest)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_tensor_parallel_rank_by_itself_copies_only_what_is_fused_by_heads(
    kind: str, workers: Workers, model: Callable[..., Path]
) -> None:
    with workers.group(configuration(model(kind), 1)) as group:
        assert group.run(copied) == [{"q_proj.weight", "k_proj.weight", "v_proj.weight"}]


# SGLang makes one weight of both, and only of those that it gets in one request
JOINED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")


@pytest.mark.parametrize(
    ("kind", "world", "parallel", "together"),
    [
        ("deepseek_v3", 1, {}, True),
        ("kimi_k2", 2, {"tensor": 2, "sequence": True}, True),
        pytest.param("deepseek_v3", 2, {"pipeline": 2}, True, marks=pytest.mark.slow),
        ("glm4_moe_lite", 1, {}, False),  # its tiny model has no latent of queries
    ],
)
def test_what_an_engine_joins_is_in_one_bucket(
    kind: str,
    world: int,
    parallel: dict[str, Any],
    together: bool,
    workers: Workers,
    model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Buckets that a tensor or two fill: q_a_proj came without the other half, and SGLang kept the former weights."""
    with workers.group(configuration(model(kind), world, parallel=parallel)) as group:
        group.call("export", str(tmp_path / "export"), 0)
        found = group.run(passed)
    exported = {
        name: t for file in (tmp_path / "export").glob("*.safetensors") for name, t in load_file(file).items()
    }
    for buckets in found:
        every = {name: tensor for tensors, *_ in buckets for name, tensor in tensors.items()}
        assert sum(len(tensors) for tensors, *_ in buckets) == len(every)
        assert every.keys() == exported.keys()
        assert all(tensor.equal(exported[name]) for name, tensor in every.items())
        assert all(size <= SIZE or len(tensors) in (1, len(JOINED)) for tensors, size, *_ in buckets)
        pairs = [
            sorted(name.rpartition(".self_attn.")[2] for name in tensors if name.endswith(JOINED))
            for tensors, *_ in buckets
        ]
        assert all(len(pair) % 2 == 0 for pair in pairs) == together
        assert any(pairs)
