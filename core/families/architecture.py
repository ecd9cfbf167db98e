"""The model that a config.json describes: its sizes, and what follows from them in parameters and operations.

Knows nothing of files and tensors: config_file.py and tensors.py read those. No torch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from millrace.core.families.decoder import EXPERT_COUNTS, TOGETHER
from millrace.core.families.delta_net import DeltaNet
from millrace.core.families.family import ModelPart
from millrace.core.families.registry import family_named
from millrace.core.families.rope_scaling import KINDS, RotaryScaling
from millrace.core.families.routing import SigmoidRouting


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    tied: bool
    value_dim: int  # of a head's values
    q_rank: int  # of the latent that queries are made from; 0: they are projected from hidden states
    kv_rank: int  # of the latent that all keys and values are made from; 0: they are projected
    eps: float  # epsilon of the norms, but of latents'
    rope_theta: float
    rotary: int  # dimensions of a head that rotate
    interleaved: bool  # whether neighbouring dimensions rotate together
    rope_scaling: RotaryScaling | None
    windows: tuple[int, ...]  # by layer, to how many keys a token attends, with itself; 0: to all before it
    experts: int  # of a layer that has any; 0: no layer has
    expert_layers: tuple[int, ...]  # numbers of the layers that have experts; the others have a dense MLP
    expert_ffn: int
    experts_used: int  # by a token
    shared_ffn: int  # of the experts that every token uses, together; 0: none
    shared_gate: bool  # whether a gate weighs these
    norm_topk: bool  # whether the weights of a token's experts sum to 1, before a factor
    routing: SigmoidRouting | None  # None: routers take a softmax
    qkv_bias: bool  # whether queries, keys and values have biases
    qk_norm: bool  # whether queries and keys are normalised, head by head
    branch_norms: bool  # whether a layer also has norms after attention and after the feed-forward part
    biases: bool  # whether each linear layer has a bias
    sinks: bool  # whether each head has a key without a value that every token attends to
    swiglu_limit: float  # of the gate and up values of a clamped gate; 0: the gate is silu
    further_layers: int  # stored after the last, not used: they predict tokens after the next one
    output_gate: bool  # whether what a head attends to is multiplied by a gate
    centred: bool  # whether a norm multiplies by its weight plus 1
    experts_together: (
        bool  # whether tensors hold all experts of a layer, in a family of which some checkpoints do
    )
    delta: DeltaNet | None  # of the layers without keys of all tokens; None: there are none

    def sizes(self, layer: int | None = None) -> dict[str, int]:
        """The sizes that shapes of tensors are made of, by the names that a family's parts use: of a layer, or outside of layers.

        `q` and `kv`: all heads together; `attended`: values' heads. `kv_down`: a token's latent and the part of its keys that
        rotates; `kv_up`: the rest of keys, and values, of all heads. A size of 0 says that the layer has no such part.
        """
        mixture, attends = layer in self.expert_layers, int(layer not in self.delta_layers)
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "heads": self.heads,
            "q": attends * self.heads * self.head_dim,
            "q_and_gate": attends * 2 * self.heads * self.head_dim,
            "kv": attends * self.kv_heads * self.head_dim,
            "head_dim": attends * self.head_dim,
            "attended": self.heads * self.value_dim,
            "q_rank": self.q_rank,
            "q_direct": 0 if self.q_rank else self.heads * self.head_dim,
            "kv_rank": self.kv_rank,
            "kv_down": self.kv_rank + self.rotary,
            "kv_up": self.heads * (self.head_dim - self.rotary + self.value_dim),
            "ffn": 0 if mixture else self.ffn,
            "gate_up": 0 if mixture else 2 * self.ffn,
            "expert_ffn": self.expert_ffn if mixture else 0,
            "expert_pair": 2 * self.expert_ffn if mixture else 0,
            "experts": self.experts if mixture else 0,
            "shared_ffn": self.shared_ffn if mixture else 0,
            "shared_gate": int(mixture and self.shared_gate),
            **(self.delta.sizes(layer) if self.delta else {}),
        }

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with delta net."""
        return self.delta.layers if self.delta else ()

    @property
    def experts_apart(self) -> bool:
        """The opposite of `experts_together`."""
        return not self.experts_together

    def has(self, part: ModelPart) -> bool:
        """Whether it has the flag that a part of its family asks for."""
        return not part.when or bool(getattr(self, part.when))

    def shapes(self, part: ModelPart, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shapes of a part's tensors, of one expert if it is an expert's; empty if the layer with these sizes does not have it."""
        if not self.has(part):
            return {}
        shapes = {name: tuple(sizes[size] for size in shape) for name, shape in part.tensors.items()}
        return shapes if all(map(all, shapes.values())) else {}

    def counted(self, layer: int) -> Iterator[tuple[ModelPart, int]]:
        """The parts of a layer, with the number of parameters of each, of all experts together."""
        sizes = self.sizes(layer)
        for part in family_named(self.family).layer:
            shapes = self.shapes(part, sizes)
            if shapes:
                times = self.experts if part.of_experts and not part.stacked else 1
                yield part, times * sum(map(math.prod, shapes.values()))

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of an output layer that is not tied to it."""
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model."""
        layers = sum(count for layer in range(self.layers) for _, count in self.counted(layer))
        return layers + self.embedding * (1 if self.tied else 2) + self.hidden

    @cached_property
    def products(self) -> int:
        """Weights that a token is multiplied with, the output layer's among them."""
        used = self.embedding
        for layer in range(self.layers):
            for part, count in self.counted(layer):
                if all(len(shape) > 1 + part.stacked for shape in part.tensors.values()):
                    used += count * self.experts_used // self.experts if part.of_experts else count
        return used

    def flops(self, tokens: int) -> int:
        """Operations of a forward pass over one sequence: products with weights, and causal attention, which is quadratic."""
        pairs = sum(
            tokens**2 - max(0, tokens - window) ** 2 if window else tokens**2
            for layer, window in enumerate(self.windows)
            if layer not in self.delta_layers
        )
        scores = self.heads * (self.head_dim + self.value_dim) * pairs
        remembered = len(self.delta.layers) * self.delta.flops(tokens) if self.delta else 0
        return 2 * tokens * self.products + scores + remembered

    def step_flops(self, lengths: Iterable[tuple[int, int]], *, frozen: bool = False) -> int:
        """Operations that forward and backward passes over samples need. Recomputation is not counted, as in any MFU.

        lengths: tokens of each sample, and of its response, for which alone the output layer is needed. frozen: the weights get no
        gradients, as beside adapters, so that backward passes have half as many products.
        """
        total = 0
        for tokens, response in lengths:
            products = 2 * (tokens * self.products - (tokens - response) * self.embedding)
            whole = self.flops(tokens)
            total += products * (2 if frozen else 3) + 3 * (whole - 2 * tokens * self.products)
        return total

    @property
    def score_factor(self) -> float | None:
        """Factor of the attention scores; None: one over the root of a head's width."""
        if not self.kv_rank:
            return None
        return 1 / math.sqrt(self.head_dim) * (self.rope_scaling.score_factor if self.rope_scaling else 1.0)

    def kv_bytes(self, bytes_each: int, devices: int, *, latents: bool) -> int:
        """Bytes of KV cache a token, on each device of an engine. latents: whether it caches these, whole on each device."""
        if self.kv_rank and latents:
            return self.layers * (self.kv_rank + self.rotary) * bytes_each
        heads = -(-self.kv_heads // devices)
        layers = self.layers - len(self.delta_layers)
        return layers * heads * (self.head_dim + self.value_dim) * bytes_each


def architecture(hf: Mapping[str, Any]) -> Architecture:
    """The sizes in a config.json that was read by `read_hf_config`."""
    family = family_named(hf["model_type"])
    experts = next((hf[key] for key in EXPERT_COUNTS if key in hf), 0)
    mixtures = expert_layers(hf) if experts else ()
    head_dim = hf.get("qk_head_dim", hf["head_dim"])
    ffn = hf.get("intermediate_size", 0)  # without dense layers there is none
    return Architecture(
        family=family.name,
        layers=hf["num_hidden_layers"],
        hidden=hf["hidden_size"],
        ffn=ffn,
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"],
        head_dim=head_dim,
        value_dim=hf.get("v_head_dim", head_dim),
        q_rank=hf.get("q_lora_rank") or 0,
        kv_rank=hf.get("kv_lora_rank", 0),
        vocab=hf["vocab_size"],
        positions=hf["max_position_embeddings"],
        tied=hf["tie_word_embeddings"],
        eps=hf["rms_norm_eps"],
        rope_theta=hf["rope_theta"],
        rotary=hf.get("qk_rope_head_dim", int(head_dim * hf.get("partial_rotary_factor", 1.0))),
        interleaved=hf.get("rope_interleave", family.interleaved),
        windows=tuple(hf.get("windows") or [0] * hf["num_hidden_layers"]),
        rope_scaling=_scaling(hf.get("rope_scaling")),
        experts=experts if mixtures else 0,
        expert_layers=mixtures,
        expert_ffn=hf.get("moe_intermediate_size", ffn) if mixtures else 0,
        experts_used=hf["num_experts_per_tok"] if mixtures else 0,
        shared_ffn=_shared_ffn(hf) if mixtures else 0,
        shared_gate=bool(mixtures) and "shared_expert_intermediate_size" in hf,
        norm_topk=bool(mixtures) and hf.get("norm_topk_prob", True),
        routing=_routing(hf) if mixtures else None,
        qkv_bias=hf.get("attention_bias", family.has("linear_qkv.bias")),
        qk_norm=hf.get("use_qk_norm", family.has(".k_layernorm.weight")),
        branch_norms=family.has("post_mlp_layernorm.weight"),
        biases=family.has("linear_proj.bias"),
        sinks=family.has("softmax_offset"),
        swiglu_limit=hf.get("swiglu_limit", 0.0),
        further_layers=hf.get("num_nextn_predict_layers", 0),
        output_gate=any(part.form == "gated_heads" for part in family.layer),
        centred=family.centred,
        experts_together=hf.get(TOGETHER, False),
        delta=_delta(hf) if family.delta_net else None,
    )


def expert_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of the layers that have experts, in any way that config.json says it."""
    kinds = hf.get("mlp_layer_types")
    dense, step, only = (
        hf.get(key) for key in ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers")
    )
    return tuple(
        layer
        for layer in range(hf["num_hidden_layers"])
        if layer >= (dense or 0) and (layer + 1) % (step or 1) == 0 and layer not in (only or ())
        if kinds is None or kinds[layer] == "sparse"
    )


def _delta(hf: Mapping[str, Any]) -> DeltaNet:
    return DeltaNet(
        layers=tuple(hf["linear_layers"]),
        key_heads=hf["linear_num_key_heads"],
        value_heads=hf["linear_num_value_heads"],
        key_dim=hf["linear_key_head_dim"],
        value_dim=hf["linear_value_head_dim"],
        kernel=hf["linear_conv_kernel_dim"],
        interval=hf["full_attention_interval"],
    )


def _shared_ffn(hf: Mapping[str, Any]) -> int:
    shared: int = hf.get("shared_expert_intermediate_size", 0)
    return shared or hf.get("n_shared_experts", 0) * hf.get("moe_intermediate_size", 0)


def _routing(hf: Mapping[str, Any]) -> SigmoidRouting | None:
    if "routed_scaling_factor" not in hf:
        return None
    return SigmoidRouting(hf["n_group"], hf["topk_group"], hf["routed_scaling_factor"])


def _scaling(read: Mapping[str, Any] | None) -> RotaryScaling | None:
    if read is None:
        return None
    return KINDS[read["rope_type"]](**{name: value for name, value in read.items() if name != "rope_type"})
