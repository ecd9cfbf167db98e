"""The error for a rank that runs out of memory, and that such a step is not retried."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from prefect.states import Failed

from millrace.connectors.trainers.megatron.optim.offload import OptimizerOffload
from millrace.connectors.trainers.megatron.rank import TrainerRank
from millrace.connectors.trainers.memory_errors import check_host_memory, out_of_memory
from millrace.core.config import RunConfig
from millrace.core.errors import RefusedStepError, TrainerError, TrainerMemoryError
from millrace.tasks.train_step import train_step
from tests.support.trainer_ranks import configuration

PYTORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 70 GiB memory in use. See documentation"
)


def message(**trainer: Any) -> str:
    config = RunConfig.model_validate(configuration("model", **trainer))
    return str(out_of_memory("train", 0, config, PYTORCH))


def test_the_message_names_the_fields_with_their_values_and_what_was_requested() -> None:
    text = message(max_pack_tokens=65536)
    assert "trainer.max_pack_tokens (now 65536: lower it)" in text
    assert "trainer.recompute (now none: selective or full)" in text
    assert "trainer.logprob_chunk_tokens (now 16" in text
    assert "Tried to allocate 2.00 GiB" in text
    assert "of which 1.06 GiB is free" in text
    assert "Including" not in text


@pytest.mark.parametrize(("recompute", "remedy"), [("selective", "now selective: full"), ("full", None)])
def test_only_what_can_still_be_changed_is_named(recompute: str, remedy: str | None) -> None:
    text = message(recompute=recompute)
    assert (remedy in text) if remedy else ("trainer.recompute" not in text)


def test_fsdp_names_only_what_it_takes() -> None:
    text = message(kind="fsdp")
    assert "trainer.recompute (now none: full)" in text
    assert "trainer.world_size or .parallel.context (more GPUs a model)" in text
    assert "tensor" not in text
    assert "trainer.optimizer.offload (now 0: raise it)" in text


@pytest.mark.parametrize("offload_engines", [True, False])
def test_engines_on_the_same_gpu_are_named(offload_engines: bool) -> None:
    values = configuration("model", device="cuda")
    values["placement"] = {"colocate": True, "offload_engines": offload_engines}
    values["engines"] = {"kind": "sglang", "sglang": {"mem_fraction_static": 0.6}}
    text = str(out_of_memory("train", 0, RunConfig.model_validate(values), PYTORCH))
    lower = "engines.sglang.mem_fraction_static (now 0.6: lower it)"
    assert ("placement.offload_engines (now false: true)" in text) == (lower in text) == (not offload_engines)
    assert ("now 0.6, if memory runs out while engines generate" in text) == offload_engines


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        (PYTORCH, True),
        (
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com",
            True,
        ),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("unhandled cuda error, NCCL version 2.27.5\nLast error:\nCuda failure 2 'out of memory'", True),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA calloc async 24 bytes", True),
        ("ncclSystemError: System call failed.\nLast error:\nCuda failure 'out of memory'", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("out of resource: shared memory, Required: 262144, Hardware limit: 232448", False),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("ncclSystemError: socketStartConnect: Connect failed: Connection refused", False),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", False),
    ],
)
def test_memory_that_runs_out_in_a_library_raises_the_same_error_as_pytorchs(text: str, memory: bool) -> None:
    rank = TrainerRank({}, 0, 1)
    rank.config, rank.device = RunConfig.model_validate(configuration("model")), torch.device("cpu")
    with (
        pytest.raises(TrainerMemoryError if memory else RuntimeError) as raised,
        rank._working("bucket", everything=False),
    ):
        raise RuntimeError(text)
    assert ("rank 0 ran out of GPU memory in bucket" in str(raised.value)) == memory
    assert rank.busy is None


@pytest.mark.parametrize("memory", [True, False])
def test_host_memory_that_cannot_be_pinned_is_named(monkeypatch: pytest.MonkeyPatch, memory: bool) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "CUDA error: out of memory" if memory else "CUDA error: unspecified launch failure"
        )

    monkeypatch.setattr(torch, "empty", refuses)
    with pytest.raises(TrainerMemoryError if memory else RuntimeError) as raised:
        OptimizerOffload([])._host(0, 3 * 2**20)
    named = ("to pin 3 MiB", "the host has no memory", "placement.offload_trainer=false (now true)")
    assert all((words in str(raised.value)) == memory for words in named)


@pytest.mark.parametrize(
    ("world", "colocate", "gib", "free", "needed"),
    [
        (1, False, 5, 6, None),
        (1, False, 7, 6, "1 ranks need 7.0 GiB"),
        (2, False, 2, 6, None),
        (2, False, 4, 6, "2 ranks need 8.0 GiB"),
        (16, False, 1, 6, "8 ranks need 8.0 GiB"),  # the others are on other nodes
        (1, True, 4, 6, "1 ranks need 8.0 GiB"),  # optimizer state that is offloaded
        (1, True, 2, 6, None),
    ],
)
def test_a_host_without_memory_for_checkpoints_is_named_before_any_is_taken(
    monkeypatch: pytest.MonkeyPatch, world: int, colocate: bool, gib: int, free: int, needed: str | None
) -> None:
    values = configuration("model")
    values["trainer"]["world_size"], values["placement"] = world, {"colocate": colocate}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free * 2**30))
    config = RunConfig.model_validate(values)
    with pytest.raises(TrainerMemoryError) if needed else nullcontext() as raised:
        check_host_memory(gib * 2**30, config)
    for words in (needed, "6.0 GiB of memory free", "checkpoint.background=false") if needed else ():
        assert words in str(raised.value)


def test_a_step_that_would_fail_again_is_not_retried_and_any_other_is() -> None:
    assert train_step.retry_condition_fn is not None
    lasting = [TrainerMemoryError("full"), RefusedStepError("the loss is nan")]
    lasting.append(ExceptionGroup("outer", [ExceptionGroup("inner", lasting[:1])]))
    for error, again in (*((error, False) for error in lasting), (TrainerError("other"), True)):
        assert train_step.retry_condition_fn(train_step, None, Failed(data=error)) is again  # type: ignore[arg-type]
