"""Every assignment into an object of PyTorch or megatron-core: one function each, with the version and the reason.

Written for megatron-core 0.16 to 0.19 and PyTorch 2.13, without Transformer Engine and Apex. On an upgrade, read each function
against the new source. Imports nothing of millrace: other modules call these functions and pass what they put in place.

Not patches, and set in the modules that use them: fields meant to be set (hooks of a TransformerConfig, layer specs,
`param_groups`) and megatron's marks on parameters of our models (`sequence_parallel`, `grad_added_to_main_grad`).
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Accumulate = Callable[[Tensor, Tensor, Tensor], None]  # layer's input, output gradient, fp32 total


# a host without a GPU


def answer_cuda_calls_on_cpu(device: torch.device) -> None:
    """torch.cuda (PyTorch 2.13): calls that megatron makes on every host, and that fail without a GPU.

    A TorchFunctionMode does not see them, since they take no tensor.
    """
    cuda: Any = torch.cuda
    cuda.current_device = lambda: device
    cuda.synchronize = lambda *_: None
    cuda.current_stream = lambda *_: None
    cuda.empty_cache = lambda: None


def use_cpu_rng() -> None:
    """megatron-core 0.16 to 0.19, tensor_parallel.random: the RNG tracker reads and writes a GPU generator's state."""
    from megatron.core.tensor_parallel import random

    module: Any = random
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def make_no_stream_on_cpu(device: torch.device) -> None:
    """megatron-core 0.16 to 0.19, moe.token_dispatcher: a new dispatcher creates a stream of the GPU, unless its class has one.

    millrace takes only its process groups.
    """
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher_class: Any = token_dispatcher.MoEAlltoAllTokenDispatcher
    dispatcher_class.cuda_dtoh_stream = device


@cache
def exchange_uneven_parts_on_cpu() -> None:
    """megatron-core 0.16 to 0.19, tensor_parallel.mappings: ranks that share experts' tensors gather and sum different numbers of tokens.

    gloo takes uneven parts only in an all-to-all, through which each rank here sends its part to every other.
    """
    from megatron.core.tensor_parallel import mappings

    module: Any = mappings
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_uneven(
        x: Tensor, group: Any, output_split_sizes: Any = None, *more: Any, **options: Any
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, *more, **options)
        out = x.new_empty(sum(output_split_sizes), *x.shape[1:])
        sent = x.repeat(group.size(), *(1,) * (x.dim() - 1))
        _all_to_all(out, sent, output_split_sizes, [len(x)] * group.size(), group)
        return out

    def scatter_uneven(
        x: Tensor, group: Any, input_split_sizes: Any = None, *more: Any, **options: Any
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(x, group, input_split_sizes, *more, **options)
        own = input_split_sizes[group.rank()]
        received = x.new_empty(group.size(), own, *x.shape[1:])
        _all_to_all(received.flatten(0, 1), x.contiguous(), [own] * group.size(), input_split_sizes, group)
        return received.sum(0)

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


def _all_to_all(out: Tensor, sent: Tensor, received: Any, parts: Any, group: Any) -> None:
    torch.distributed.all_to_all_single(out, sent, list(received), list(parts), group=group)


# the model


def rotate_heads_by(module: Any, rotated: Callable[[Tensor, Tensor, Tensor, Tensor], Any]) -> None:
    """transformers 5, a family's modeling module: rotary positions are a function of it, of five passes over memory."""
    module.apply_rotary_pos_emb = rotated


def name_missing_transformer_engine() -> None:
    """megatron-core 0.16 to 0.19, moe.moe_utils: the router reads `te_general_gemm`, defined only with Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        module: Any = moe_utils
        module.te_general_gemm = None


def offer_weight_gradient_product(accumulate: Accumulate) -> bool:
    """megatron-core 0.16 to 0.19, tensor_parallel.layers: it sums weight gradients in fp32 with an extension of Apex.

    With a GPU and without Apex, `accumulate` replaces both functions of that extension. Returns whether megatron has gradient
    accumulation fusion.
    """
    from megatron.core.tensor_parallel import layers

    module: Any = layers
    if not module._grad_accum_fusion_available and torch.cuda.is_available():
        module.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
        )
        module._grad_accum_fusion_available = True
    return bool(module._grad_accum_fusion_available)


def leave_new_memory_unfilled() -> None:
    """torch.utils.deterministic (PyTorch 2.13): deterministic mode fills new tensors, at the cost of a pass over memory."""
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


@contextlib.contextmanager
def shapes_known(forward: Iterator[list[int]], backward: Iterator[list[int]]) -> Iterator[None]:
    """P2PCommunicator (megatron-core 0.16 to 0.19): stages exchange the shape of each tensor before the tensor, and wait for it.

    All ranks of a pipeline have the same packs, so the shapes of what a rank receives are known, in order: of hidden states and of
    gradients. With virtual stages the exchange is wrong, too: two ranks send both ways at once, and each takes the one shape for
    the other, or both wait.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicator: Any = P2PCommunicator
    inherited = communicator._communicate_shapes

    def known(_: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
        return next(forward) if recv_prev else [0, 0, 0], next(backward) if recv_next else [0, 0, 0]

    communicator._communicate_shapes = known
    try:
        yield
    finally:
        communicator._communicate_shapes = inherited


# checkpoints


@contextlib.contextmanager
def checkpoints_read_as_data(metadata: Any, as_data: Callable[[Any], Any]) -> Iterator[None]:
    """torch.distributed.checkpoint (PyTorch 2.13): it unpickles a table of contents and objects, and calls any function that they name.

    metadata: the table of contents, already read. as_data(stored) returns the stored object without anything callable.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

    reader: Any = FileSystemReader
    planner: Any = DefaultLoadPlanner
    inherited = reader.read_metadata, planner.load_bytes

    def read_metadata(self: Any, *_: Any, **__: Any) -> Any:
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def load_bytes(self: Any, read_item: Any, value: Any) -> None:
        inherited[1](self, read_item, as_data(value))

    reader.read_metadata, planner.load_bytes = read_metadata, load_bytes
    try:
        yield
    finally:
        reader.read_metadata, planner.load_bytes = inherited


# the optimizer


def replace_weight_copy(optimizer: Any, copy: Callable[[], None]) -> None:
    """DistributedOptimizer (megatron-core 0.16 to 0.19): it copies fp32 parameters to the model's parameters one by one."""
    optimizer._copy_main_params_to_model_params = copy


def step_elsewhere(
    optimizer: Any,
    prepare: Callable[[], None],
    for_norm: Callable[[], list[Tensor]],
    finish: Callable[[], None],
) -> None:
    """DistributedOptimizer (megatron-core 0.16 to 0.19): it takes each fp32 parameter to be where its gradient is.

    prepare: gives gradients to the parameters that the optimizer itself steps. for_norm: the gradients of all parameters that count
    in the norm on this rank. finish: called after its step, steps the others and writes all weights to the model's buffer.
    """
    optimizer._copy_model_grads_to_main_grads = prepare
    optimizer.get_main_grads_for_grad_norm = for_norm
    optimizer._copy_main_params_to_model_params = finish


def set_gradient_divisor(adam: torch.optim.Optimizer, divisor: Tensor | None) -> None:
    """torch.optim.AdamW (PyTorch 2.13): its fused kernel divides gradients by `grad_scale`, which GradScaler sets.

    Used for clipping, so that gradients need no separate pass over memory for scaling.
    """
    fused: Any = adam
    fused.grad_scale = divisor


@contextlib.contextmanager
def parameters_saved_in_place(optimizers: list[Any], state_of: Callable[..., Any]) -> Iterator[None]:
    """DistributedOptimizer (megatron-core 0.16 to 0.19): saving gathers all parameters and moments in each rank's host memory, twice.

    For 4 billion parameters that takes minutes. With tied embeddings over pipeline stages it is also wrong: it drops the padding
    between buckets, but its indices count the padding. state_of(optimizer, model_state, loading=...) replaces it.
    """

    def replacement(optimizer: Any) -> Callable[..., Any]:
        def sharded(model_state: Any, is_loading: bool = False, metadata: Any = None) -> Any:
            return state_of(optimizer, model_state, loading=is_loading)

        return sharded

    for optimizer in optimizers:
        optimizer.sharded_param_state_fully_reshardable = replacement(optimizer)
    try:
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("sharded_param_state_fully_reshardable")


@contextlib.contextmanager
def empty_parts_saved(optimizers: list[Any]) -> Iterator[None]:
    """DistributedOptimizer (megatron-core 0.16 to 0.19): its state has the step of its parameters, and raises if it has none.

    A pipeline rank without experts has such a part, since every rank has the parts of all.
    """

    def groups_alone(optimizer: Any) -> Callable[[], Any]:
        def state_dict() -> Any:
            groups = [{**group, "step": 0.0} for group in optimizer.optimizer.param_groups]
            for group in groups:
                del group["params"]
            return {"optimizer": {"param_groups": groups}}

        return state_dict

    for optimizer in optimizers:
        optimizer.state_dict, optimizer.load_state_dict = groups_alone(optimizer), lambda _: None
    try:
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("state_dict")
            vars(optimizer).pop("load_state_dict")


@contextlib.contextmanager
def steps_kept_on_load(optimizers: list[Any]) -> Iterator[None]:
    """DistributedOptimizer (megatron-core 0.16 to 0.19): loading sets a parameter's state without Adam's `step`.

    The loaded state has the step in another place, but PyTorch's AdamW requires it in the parameter's state.
    """
    for optimizer in optimizers:
        optimizer._set_main_param_and_optimizer_states = _set_states_with_step(optimizer)
    try:
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("_set_main_param_and_optimizer_states")


def _set_states_with_step(optimizer: Any) -> Callable[..., None]:
    inherited = optimizer._set_main_param_and_optimizer_states

    def set_states(parameter: Any, tensors: dict[str, Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        inherited(parameter, {**optimizer.optimizer.state[main], **tensors})

    return set_states
