"""The policy and the critic as megatron-core GPTModels, built from a Hugging Face config.

Owns construction. The last stage returns hidden states, not logits: `logprobs` computes log-probabilities from them, so that
the logits of a whole pack never exist.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from millrace.connectors.trainers.megatron.model.attention import PackedAttention
from millrace.connectors.trainers.megatron.model.delta_net import PackedDeltaNet
from millrace.connectors.trainers.megatron.model.expert_loads import ExpertLoads
from millrace.connectors.trainers.megatron.model.experts import ExpertsLayer
from millrace.connectors.trainers.megatron.model.latent_attention import LatentCore, PackedLatentAttention
from millrace.connectors.trainers.megatron.model.layers import (
    BranchNormLayer,
    CentredNorm,
    ClampedGate,
    GatedSilu,
    Norm,
    PackedLayer,
    PackedSelfAttention,
)
from millrace.connectors.trainers.megatron.model.replayed_router import PackRouter, RoutingAgreement
from millrace.connectors.trainers.megatron.model.router_losses import LossRouter, RouterLosses
from millrace.connectors.trainers.megatron.model.sigmoid_router import SigmoidRouter
from millrace.connectors.trainers.megatron.model.transformer_config import transformer_config
from millrace.connectors.trainers.ops.fused import rotary_table
from millrace.core.config import RunConfig
from millrace.core.config.megatron_options.transformer import moe_losses
from millrace.core.families.architecture import Architecture, architecture


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states [T, 1, H] instead of logits.

    Layers get cosines and sines of this rank's tokens instead of angles by position: packs repeat positions, so every layer would
    have to look them up.
    """

    router_losses: RouterLosses | None = None  # for a mixture of experts with auxiliary losses
    table_factor = 1.0  # of cosines and sines

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = list(super()._preprocess(input_ids, position_ids, *args, **kwargs))
        inputs[1] = rotary_table(inputs[1], position_ids[0]) * self.table_factor
        return tuple(inputs)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class CriticModel(PolicyModel):
    """The policy's layers with a scalar head, zero at first, instead of the output layer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{**arguments, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(self.config.hidden_size, 1, dtype=self.config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sharded state dict. GPTModel's method requires an output layer."""
        state: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        return state


def padded_vocab(vocab: int, tensor_parallel: int) -> int:
    """Vocabulary rounded up so that every tensor parallel rank holds the same number of rows."""
    return -(-vocab // tensor_parallel) * tensor_parallel


def submodules_of(part: Any) -> Any:
    """The submodules of a layer's part. The part is a ModuleSpec up to megatron-core 0.17, and may be a partial since 0.18."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


def made_by(part: Any, layer_class: type) -> Any:
    """A layer's part, made by this class; see `submodules_of`."""
    if isinstance(part, partial):
        return partial(layer_class, *part.args, **part.keywords)
    # no ModuleSpec, since megatron would warn of a class in it that it does not know
    return SimpleNamespace(module=layer_class, params=part.params, submodules=part.submodules)


class RankModel(torch.nn.Module):
    """This rank's stages of a model, in the order of its layers: one, or as many as there are virtual stages."""

    def __init__(self, stages: Sequence[PolicyModel]) -> None:
        super().__init__()
        self.stages: Any = torch.nn.ModuleList(stages)

    @property
    def config(self) -> TransformerConfig:
        """The configuration that all stages share."""
        config: TransformerConfig = self.last.config
        return config

    @property
    def last(self) -> Any:
        """The last stage, which has the head on the last rank of a pipeline."""
        return self.stages[-1]

    @property
    def router_losses(self) -> RouterLosses | None:
        """The losses of the routers of all stages."""
        losses: RouterLosses | None = self.last.router_losses
        return losses

    @property
    def adapted(self) -> bool:
        """Whether adapters are trained beside the weights."""
        return hasattr(self.last, "adapters")

    @property
    def agreements(self) -> list[RoutingAgreement]:
        """What the routers of all stages have counted."""
        return [part.agreement for part in self.modules() if isinstance(part, PackRouter)]

    @property
    def expert_loads(self) -> list[ExpertLoads]:
        """What the layers with experts of all stages have counted."""
        return [part.loads for part in self.modules() if isinstance(part, ExpertsLayer)]

    def sharded_state_dict(self) -> dict[str, Any]:
        """The sharded state of all stages, by the names of `state_dict`; with adapters only theirs."""
        return {
            f"stages.{number}.{name}": item
            for number, stage in enumerate(self.stages)
            for name, item in (
                stage.adapters.sharded_state_dict("adapters.") if self.adapted else stage.sharded_state_dict()
            ).items()
        }


def build_model(config: RunConfig, hf: dict[str, Any], kind: type[PolicyModel] = PolicyModel) -> RankModel:
    """Build this rank's stages of a model on its device. The weights of matrices are not initialised."""
    tc, arch = transformer_config(config, hf), architecture(hf)
    options = moe_losses(config.trainer.megatron)
    losses = RouterLosses(options, tc) if tc.num_moe_experts and options.wanted else None
    plain = PackRouter if config.rollout.routing_replay else None
    router = partial(LossRouter, losses) if losses else SigmoidRouter if arch.routing else plain
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size()
    numbers = [None] if virtual is None else list(range(virtual))
    return RankModel([_stage(tc, arch, kind, router, losses, number) for number in numbers])


def _stage(
    tc: TransformerConfig,
    arch: Architecture,
    kind: type[PolicyModel],
    router: Any,
    losses: RouterLosses | None,
    number: int | None,
) -> PolicyModel:
    """One stage of this rank. router: of layers with experts, None for megatron's. number: among virtual stages."""
    first, count = get_transformer_layer_offset(tc, number), get_num_layers_to_build(tc, number)
    kinds = [
        (layer in arch.expert_layers, layer in arch.delta_layers) for layer in range(first, first + count)
    ]
    specs = {kind: _layer_spec(tc, arch, *kind, router) for kind in set(kinds)}
    model = kind(
        config=tc,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[specs[kind] for kind in kinds], layer_norm=CentredNorm if arch.centred else Norm
        ),
        vocab_size=padded_vocab(arch.vocab, tc.tensor_model_parallel_size),
        max_sequence_length=arch.positions,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
        vp_stage=number,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        parallel_output=True,
    )
    # always computed on the CPU, since powers on a GPU may differ in the last bits
    frequencies = RotaryEmbedding(
        arch.rotary, 1.0, rotary_base=arch.rope_theta, use_cpu_initialization=True
    ).inv_freq
    if scaling := arch.rope_scaling:
        frequencies, model.table_factor = scaling.scaled(frequencies, arch.rope_theta), scaling.table_factor
    model.rotary_pos_emb.inv_freq = frequencies
    # one angle a pair: `fused.rotate` knows which dimensions make one
    model.rotary_pos_emb.rotary_interleaved = False
    if tc.num_moe_experts and tc.expert_tensor_parallel_size != tc.tensor_model_parallel_size:
        # megatron marks them only with expert parallelism, and would sum their gradients over the ranks of other weights
        for name, parameter in model.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = False
    model.router_losses = losses
    for part in model.modules():
        if isinstance(part, SequentialMLP):
            _keep_biases_apart(part)
    return model


def _keep_biases_apart(experts: SequentialMLP) -> None:
    """Correct what megatron says of the output biases of experts, which are whole on each rank.

    It would sum their gradients over tensor parallel ranks, which hold other experts, and count those of one rank in norms.
    """
    for expert in experts.local_experts:
        bias = expert.linear_fc2.bias
        if bias is not None:
            bias.sequence_parallel, bias.tensor_model_parallel = False, True
            # else the output would be a view of a reduction over one rank, to which megatron cannot add the bias in place
            expert.linear_fc2.explicit_expert_comm = True


def _layer_spec(
    tc: TransformerConfig, arch: Architecture, mixture: bool, delta: bool, router: Any
) -> ModuleSpec:
    """The specification of a layer. mixture: whether it has experts; delta: whether it has delta net instead of attention; router:
    the experts', None for megatron's."""
    spec = get_gpt_layer_local_spec(
        num_experts=tc.num_moe_experts if mixture else None,
        moe_grouped_gemm=False,
        qk_layernorm=tc.qk_layernorm,
        multi_latent_attention=arch.kv_rank > 0,
        normalization="RMSNorm",
    )
    spec.module = BranchNormLayer if arch.branch_norms else PackedLayer
    layer = spec.submodules
    layer.self_attention.module = PackedLatentAttention if arch.kv_rank else PackedSelfAttention
    feed_forward = submodules_of(layer.mlp)
    experts_or_dense = submodules_of(feed_forward.experts) if mixture else feed_forward
    experts_or_dense.activation_func = ClampedGate if arch.swiglu_limit else GatedSilu
    if mixture:
        layer.mlp = made_by(layer.mlp, ExpertsLayer)
    if mixture and tc.moe_shared_expert_intermediate_size:
        submodules_of(feed_forward.shared_experts).activation_func = GatedSilu
    if mixture and router is not None:
        feed_forward.router = router
    attention, norm = layer.self_attention.submodules, CentredNorm if arch.centred else Norm
    attention.core_attention = LatentCore if arch.kv_rank else PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if tc.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if delta:
        layer.self_attention = ModuleSpec(PackedDeltaNet)
    return spec
