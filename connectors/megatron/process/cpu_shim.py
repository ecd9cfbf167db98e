"""Makes megatron-core's literal "cuda" mean the CPU, where there is no GPU. Nothing in megatron is edited.

Besides weight_gradients, the only place in the project that patches anything. `install` once a process, `on_cpu` around each thread's calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
CUDA_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


class _CudaMeansCpu(TorchFunctionMode):
    """Turns device="cuda" into cpu, drops pinned memory, and answers the optimizers' type checks."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return CUDA_TYPES.get(args[0].dtype) or func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in (torch.Tensor.to,) and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def install() -> None:
    """Patch the handful of calls that no function mode sees. Asserts that there is no GPU."""
    assert not torch.cuda.is_available(), "the CPU shim is for hosts without a GPU"
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: None
    cuda.empty_cache = lambda: None

    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    module: Any = megatron_random
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    dispatcher: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = (
        CPU  # anything but None: its side stream, which copies split sizes to the CPU
    )
    dispatcher._maybe_dtoh_and_synchronize = _split_sizes


def _split_sizes(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """The experts' dispatcher hands split sizes to collectives as arrays, not tensors."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        sizes = getattr(dispatcher, name, None)
        if isinstance(sizes, torch.Tensor):
            setattr(dispatcher, name, sizes.numpy())
    return tokens_per_expert


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Within, this thread's "cuda" is the CPU."""
    with _CudaMeansCpu():
        yield


def suspended() -> Any:
    """Within, the substitution rests: for stretches that name no device, since it costs a little a torch call."""
    return torch._C.DisableTorchFunction()
