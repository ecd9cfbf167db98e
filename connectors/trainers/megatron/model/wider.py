"""Runs a model in the next wider type than its weights': bfloat16 in float32, float32 in float64.

Owns the casts: a layer's weights are cast while it runs, so that the extra memory is one layer's and the embeddings'. The stored
weights do not change. All computation uses the plain forms of `fused`, `logprobs` and `attention`, which accept any type. Knows
nothing of the use of the results.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module, Parameter

from millrace.connectors.trainers.ops.fused import plain_forms

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
ROUTER = {torch.float32: "fp32", torch.float64: "fp64"}  # megatron's names


@contextlib.contextmanager
def computing_wider(inner: Any) -> Iterator[torch.dtype]:
    """A context in which the model's forward passes compute in the yielded type, without gradients.

    Every rank must enter it. inner: a RankModel. Does not cast the output layer's weight: the caller does.
    """
    config = inner.config
    wide = WIDER[config.params_dtype]
    before = config.pipeline_dtype, config.moe_router_dtype
    cast = _Cast(wide)
    hooks = [
        hook
        for stage in inner.stages
        for part in (*stage.decoder.layers, stage.decoder.final_layernorm)
        if part is not None  # only the last stage has the final norm
        for hook in (
            part.register_forward_pre_hook(cast.before, prepend=True),
            part.register_forward_hook(cast.after, always_call=True),
        )
    ]
    if inner.stages[0].pre_process:  # casting the rows is the same as casting the embedding's whole table
        embedding = inner.stages[0].embedding
        hooks.append(embedding.register_forward_hook(lambda _module, _inputs, out: out.to(wide)))
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
    """Replaces the weights of the running part by cast copies.

    The parameters themselves keep their type: with another type autograd would lose the hooks that sum gradients.
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
