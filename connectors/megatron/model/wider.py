"""A model that computes one type wider than its weights are: bfloat16 ones in float32, float32 ones in float64.

Owns how weights are cast: those of a layer while it runs, so that the extra memory is that of one layer and the embeddings. The
weights keep their values and their memory. Everything is computed by the plain forms of `fused`, `logprobs` and `attention`,
which take any type. Knows nothing of what the numbers are for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module, Parameter

from millrace.connectors.megatron.model.fused import plain_forms

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
ROUTER = {torch.float32: "fp32", torch.float64: "fp64"}  # megatron's names


@contextlib.contextmanager
def computing_wider(inner: Any) -> Iterator[torch.dtype]:
    """Within, the model computes in the type that is yielded. Forward passes alone: it has no gradients.

    Every rank enters. inner: a GPTModel of `policy_model`, with its embeddings and output layer as they are: the caller casts
    the weight of the output layer.
    """
    config = inner.config
    wide = WIDER[config.params_dtype]
    before = config.pipeline_dtype, config.moe_router_dtype
    cast = _Cast(wide)
    hooks = [
        hook
        for part in (*inner.decoder.layers, inner.decoder.final_layernorm)
        if part is not None  # a stage before the last has no norm
        for hook in (
            part.register_forward_pre_hook(cast.before, prepend=True),
            part.register_forward_hook(cast.after, always_call=True),
        )
    ]
    if inner.pre_process:  # rows of a narrow table, cast, are rows of the wide one
        hooks.append(inner.embedding.register_forward_hook(lambda _module, _inputs, out: out.to(wide)))
    config.pipeline_dtype, config.moe_router_dtype = wide, ROUTER[wide]
    try:
        with plain_forms(), torch.no_grad():
            yield wide
    finally:
        config.pipeline_dtype, config.moe_router_dtype = before
        for hook in hooks:
            hook.remove()
        cast.after()


class _Cast:
    """The weights of the part that runs, cast, in the place of its own.

    A parameter keeps its type: with another one autograd forgets the hooks by which gradients are summed.
    """

    def __init__(self, wide: torch.dtype) -> None:
        self._wide = wide
        self._own: list[tuple[Module, str, Parameter]] = []

    def before(self, part: Module, _inputs: Any) -> None:
        assert not self._own, "one part runs at a time"
        for module in part.modules():
            for name, weight in module.named_parameters(recurse=False):
                self._own.append((module, name, weight))
                setattr(module, name, Parameter(weight.detach().to(self._wide)))

    def after(self, *_: Any) -> None:
        for module, name, weight in self._own:
            setattr(module, name, weight)
        self._own.clear()
