"""A Hugging Face model over this run's ranks: read from its folder, cut by FSDP2, called with packs.

Owns the units that FSDP gathers, the types of weights and of computation, and recomputation. Knows nothing of losses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Conv1d, Module, Parameter
from torch.utils.checkpoint import checkpoint

from millrace.connectors.trainers.checkpoint.folders import on_every_rank
from millrace.connectors.trainers.compute_type import compute_type
from millrace.connectors.trainers.fsdp import attention
from millrace.connectors.trainers.fsdp.fused_parts import fuse
from millrace.connectors.trainers.fsdp.sight import Sight
from millrace.connectors.trainers.packing import Pack
from millrace.core.config import RunConfig
from millrace.core.config.plan.memory import GATHERED
from millrace.core.errors import ConfigError, remedy_of
from millrace.core.families.images import sees_images

# keys of configurations whose models change the output layer's logits
CHANGE_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
BlockParts = tuple[Module, list[Module]]  # a block and its modules
MAIN = torch.float32  # of the weights that the optimizer changes, and of their gradients
TOWER = "model.visual"  # of a model that sees pictures, as transformers names it


class PackedModel(Module):
    """A causal language model whose loss is computed within its forward pass: FSDP gathers the output layer's weight only there."""

    def __init__(self, inner: Any, tower: Module | None = None) -> None:
        """tower: of a model that sees pictures, which is left out of the model itself."""
        super().__init__()
        self.inner = inner
        self.sees = tower is not None
        self._tower = [tower]  # no part of the module: FSDP, optimizer and checkpoints have nothing of it
        self.sight: Sight | None = None
        self.context: Any = None  # the group of context parallel ranks, if there are several
        kinds = set(inner._no_split_modules or ())
        # the blocks, whose weights FSDP gathers in this order; what is outside of them belongs to the root
        self.units = [part for part in inner.modules() if type(part).__name__ in kinds]
        assert self.units, "transformers names the blocks of every model"

    def forward(self, pack: Pack, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of a pack's hidden states [T, 1, H], which are those before the output layer."""
        if self.sees:
            return loss(self._language(pack).transpose(0, 1))
        hidden = self.inner.base_model(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            use_cache=False,
            **self._of_samples(pack),
        ).last_hidden_state
        return loss(hidden.transpose(0, 1))

    def _of_samples(self, pack: Pack) -> dict[str, Any]:
        """Arguments of the functions in `attention` beside their tensors. transformers passes them on."""
        given = {"bounds": pack.bounds, "starts": pack.starts, "longest": pack.longest}
        return given if self.context is None else {**given, "context": self.context}

    def look(self, config: RunConfig, device: torch.device) -> None:
        """Let packs have pictures. All ranks must call it."""
        tower = self._tower[0]
        assert tower is not None, "the model sees pictures"
        tower.to(device=device, dtype=compute_type(config))
        _receive([*tower.modules()])
        self.sight = Sight(config, tower, device)

    def _language(self, pack: Pack) -> Tensor:
        """Hidden states [1, T, H] of the language model beside a tower."""
        embedded = self.inner.get_input_embeddings()(pack.input_ids)
        positions = pack.position_ids.expand(4, -1)[:, None]
        more: dict[str, Any] = {}
        if self.sight is not None:
            positions, places, features = self.sight.of(pack, self.context)
            if features:
                embedded = embedded.index_copy(1, places, features[0].to(embedded.dtype)[None])
            if features[1:]:
                more["visual_pos_masks"] = torch.zeros_like(pack.input_ids, dtype=torch.bool)
                more["visual_pos_masks"][0, places] = True
                more["deepstack_visual_embeds"] = list(features[1:])
        hidden: Tensor = self.inner.model.language_model(
            inputs_embeds=embedded,
            position_ids=positions,
            use_cache=False,
            **self._of_samples(pack),
            **more,
        ).last_hidden_state
        return hidden

    @property
    def head(self) -> Parameter:
        """The output layer's weight [V, H]; whole only within a forward pass."""
        weight: Parameter = self.inner.get_output_embeddings().weight
        return weight

    @property
    def vocab(self) -> int:
        """Tokens of the vocabulary."""
        return int(self.inner.config.get_text_config().vocab_size)


def read_model(
    config: RunConfig, folder: str, device: torch.device, field: str = "model.path"
) -> PackedModel:
    """The model of a folder on the host: whole on rank 0, without values on the others, which get them as blocks are cut.

    transformers keeps a file's own tensors in the file until they are used, but stacks experts in memory: eight ranks of a host
    would hold eight copies. The others get a tower in `PackedModel.look`. All ranks must call it. field: the setting that named the
    folder. Raises ConfigError if transformers cannot make the model or read its weights.
    """
    seeing = sees_images(folder)
    found: list[Any] = []

    def read() -> dict[str, torch.dtype]:
        if dist.get_rank() > 0:
            return {}
        found.append(_read(config, folder, device, field, seeing))
        return {name: buffer.dtype for name, buffer in found[0].named_buffers()}

    types = on_every_rank(read)[0]
    inner = found[0] if found else _unread(folder, _attention(config, device), seeing, types)
    tower: Any = inner.model.visual if seeing else None
    if seeing:
        tower.set_attn_implementation("sdpa")  # of whole pictures, which are no samples of a pack
        inner.model.visual = None
    # dropout is never used: two passes of one token must agree
    return PackedModel(inner.eval(), tower)


def _attention(config: RunConfig, device: torch.device) -> str:
    """The name of the attention function, as transformers knows it."""
    attention.register()
    if config.trainer.parallel.context > 1:
        return attention.EXCHANGED
    return attention.PACKED if device.type == "cuda" and config.dtype != "float32" else "sdpa"


def _kind(seeing: bool) -> Any:
    """transformers' class for the model."""
    import transformers

    return transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM


def _read(config: RunConfig, folder: str, device: torch.device, field: str, seeing: bool) -> Any:
    """The Hugging Face model, in the type of its files."""
    try:
        read: Any = _kind(seeing).from_pretrained(
            folder,
            dtype="auto",
            attn_implementation=_attention(config, device),
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot load it: {str(error).strip().splitlines()[0]}",
            where=f"{field} = {folder}",
            remedy=remedy_of(error, "take a whole checkpoint of a causal language model"),
        ) from error
    inner, told = read
    keys = inner.config.get_text_config().to_dict()
    changed = next((key for key in CHANGE_LOGITS if keys.get(key) not in (None, 1, 1.0)), None)
    if changed or getattr(inner.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(
            f"its logits are not a product with one matrix alone ({changed or 'a bias'})",
            where=f"{field} = {folder}",
            remedy="take another model: trainer.kind=fsdp computes log-probabilities from that product",
        )
    if inner.config.model_type == "qwen3_vl_moe" and keys["hidden_size"] in (
        keys["moe_intermediate_size"],
        2 * keys["moe_intermediate_size"],
    ):
        raise ConfigError(
            "its experts are square, and transformers does not see that they are stored with their inputs first",
            where=f"{field} = {folder}",
            remedy="take a model with moe_intermediate_size other than hidden_size and its half",
        )
    memory = next((name for name, part in inner.named_modules() if isinstance(part, Conv1d)), None)
    if memory:
        raise ConfigError(
            f"its layers remember the tokens before, also those of other samples in a pack ({memory})",
            where=f"{field} = {folder}",
            remedy="take a model whose layers are attention alone, or trainer.kind=megatron for a family that it has",
        )
    if _attention(config, device) != "sdpa":
        _check_replaceable(inner, config.trainer.parallel.context, f"{field} = {folder}")
    missing = sorted(told["missing_keys"])
    if missing:
        raise ConfigError(
            f"its files have no {missing[0]}", where=f"{field} = {folder}", remedy="take a whole checkpoint"
        )
    return inner


def _check_replaceable(inner: Any, context: int, where: str) -> None:
    """Raise ConfigError if the functions of `attention` do not compute what the model's own attention does."""
    keys = inner.config.get_text_config()
    other = sorted(set(getattr(keys, "layer_types", None) or ()) - attention.KINDS)
    if other or not inner._supports_attention_backend:
        kind = (
            f"layers of {other[0]}" if other else "an attention that transformers does not let others compute"
        )
        raise ConfigError(
            f"it has {kind}",
            where=where,
            remedy="take another model, or trainer.kind=megatron if it knows the family"
            + (", or trainer.parallel.context=1" if context > 1 else ""),
        )
    heads = getattr(keys, "num_attention_heads", 0)
    if not isinstance(heads, int) or not heads or heads % context:
        raise ConfigError(
            f"does not divide the {heads} attention heads of {where}",
            where=f"trainer.parallel.context = {context}",
            remedy="use a divisor of them",
        )


def _unread(folder: str, attention: str, seeing: bool, types: Mapping[str, torch.dtype]) -> Any:
    """The same model without values: memory that nothing was written to takes no room. types: of its buffers."""
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with no_init_weights():
        inner: Any = _kind(seeing).from_config(config, attn_implementation=attention)
    inner.tie_weights()
    for name, type_ in types.items():
        owner, _, own = name.rpartition(".")
        part = inner.get_submodule(owner)
        setattr(part, own, getattr(part, own).to(type_))
    return inner


def _receive(parts: Sequence[Module]) -> None:
    """Have what modules hold themselves from rank 0, each once."""
    held: set[int] = set()
    for part in parts:
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if id(tensor) not in held:
                held.add(id(tensor))
                dist.broadcast(tensor.detach(), 0)


def shard(
    model: PackedModel, config: RunConfig, mesh: DeviceMesh, device: torch.device, *, trains: bool = True
) -> PackedModel:
    """Cut a model over the ranks, block by block: trained weights in fp32, others in the type of computation.

    trains: whether it is trained: all of it, or its adapters.
    """
    compute = compute_type(config)
    # inputs keep their type: the embedding's is the type of computation, and a pass in a wider type stays in it
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=MAIN, cast_forward_inputs=False, output_dtype=None
    )
    if not trains or config.trainer.lora is None:
        model.requires_grad_(trains)
    if device.type == "cuda":
        fuse(model)
    *blocks, root = parts_of_units(model)
    # blocks first: what is left belongs to the root, whose tied weights stay tied
    for group in (*together(blocks), [root]):
        for unit, parts in group:
            move(parts, device, compute)
            _receive(parts)
            if unit is not model and trains and config.trainer.recompute == "full":
                _recompute(unit)
        units = [unit for unit, _ in group]
        fully_shard(units, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gradients are summed over ranks, not averaged
            part.set_gradient_divide_factor(1.0)
    return model


def move(parts: Sequence[Module], device: torch.device, frozen: torch.dtype) -> None:
    """Move what modules hold themselves: trained parameters in fp32, others in the type `frozen`, buffers in their own, as a router's
    bias has one."""
    tensors: dict[int, Tensor] = {}
    for part in parts:
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in tensors:  # a tied weight is moved once
                type_ = MAIN if parameter.requires_grad else frozen
                tensors[id(parameter)] = parameter.data.to(device=device, dtype=type_).contiguous()
            parameter.data = tensors[id(parameter)]
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device).contiguous())


def _recompute(unit: Module) -> None:
    """Have the backward pass compute a block again from its input. transformers' own way needs training mode, and with it dropout."""
    unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def together(units: Sequence[BlockParts]) -> Iterator[list[BlockParts]]:
    """Blocks in order, those together whose weights are gathered at once: up to GATHERED parameters, and one block at least."""
    group: list[BlockParts] = []
    left = 0
    for unit in units:
        size = sum(parameter.numel() for part in unit[1] for parameter in part.parameters(recurse=False))
        if group and size > left:
            yield group
            group, left = [], 0
        if not group:
            left = GATHERED
        group.append(unit)
        left -= size
    if group:
        yield group


def parts_of_units(model: PackedModel) -> Iterator[BlockParts]:
    """Each block, the root last, with the modules whose weights are its own."""
    held: set[int] = set()
    for unit in model.units:
        parts = list(unit.modules())
        held.update(map(id, parts))
        yield unit, parts
    yield model, [part for part in model.modules() if id(part) not in held]
