"""Lets megatron-core run on a host without a GPU: its literal "cuda" means the CPU.

Call `install` once per process, and enter `on_cpu` around each thread's calls to megatron.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from millrace.connectors.trainers import patches

CPU = torch.device("cpu")
CUDA_TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


class _CudaMeansCpu(TorchFunctionMode):
    """Turns device="cuda" into cpu, ignores pinned memory, and satisfies the type checks of megatron's optimizers."""

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
    """Patch the calls that a function mode does not see. Asserts that there is no GPU."""
    assert not torch.cuda.is_available(), "the CPU shim is for hosts without a GPU"
    patches.answer_cuda_calls_on_cpu(CPU)
    patches.use_cpu_rng()
    patches.make_no_stream_on_cpu(CPU)
    patches.exchange_uneven_parts_on_cpu()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """A context in which this thread's "cuda" is the CPU."""
    with _CudaMeansCpu():
        yield


def suspended() -> Any:
    """A context without the substitution, for code that names no device: the substitution slows every torch call."""
    return torch._C.DisableTorchFunction()
