"""Forward passes of small decoder models over a slot cache, straight from safetensors.

Owns weights and arithmetic. Every row's result depends only on that row, bit for bit: matrix products always have at
least `ROWS` rows (with fewer, CPU kernels sum in another order), and attention spans are multiples of `SPAN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.connectors.engines.embedded.adapters import NO_ADAPTERS, Adapter, RowAdapters
from millrace.connectors.engines.embedded.by_transformers import (
    TextShape,
    TransformersDecoder,
    TransformersWeights,
    stored_tensors,
    text_shape,
)
from millrace.connectors.engines.embedded.delta_net import DeltaWeights, empty_memory
from millrace.connectors.engines.embedded.seen_images import SeenImages
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import Architecture
from millrace.core.families.decoder import GATE_SLOPE, HEAD, LATENT_EPS
from millrace.core.families.folder_tensors import FolderTensors
from millrace.core.families.registry import family_named
from millrace.core.families.tensors import stored_names, tensor_shapes
from millrace.core.families.unknown import shape_of

ROWS = 16  # with 8, some processors sum in another order than with more
SPAN = 64  # positions per step of an attention span in decoding
PREFILL_SPAN = 16  # positions per step of a prompt's length
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER = {
    "norm1": "input_layernorm.weight",
    "norm2": "pre_mlp_layernorm.weight",
    "qkv": "self_attention.linear_qkv.weight",
    "o": "self_attention.linear_proj.weight",
    "bias": "self_attention.linear_qkv.bias",
    "o_bias": "self_attention.linear_proj.bias",
    "sinks": "core_attention.softmax_offset",
    "q_norm": "self_attention.q_layernorm.weight",
    "k_norm": "self_attention.k_layernorm.weight",
    "attended_norm": "post_self_attn_layernorm.weight",
    "fed_norm": "post_mlp_layernorm.weight",
    "q_direct": "self_attention.linear_q_proj.weight",
    "q_down": "self_attention.linear_q_down_proj.weight",
    "q_up": "self_attention.linear_q_up_proj.weight",
    "kv_down": "self_attention.linear_kv_down_proj.weight",
    "kv_norm": "self_attention.kv_layernorm.weight",
    "kv_up": "self_attention.linear_kv_up_proj.weight",
}
DELTA = ("in_proj.weight", "conv1d.weight", "A_log", "dt_bias", "out_norm.weight", "out_proj.weight")
NORMS = ("norm1", "norm2", "q_norm", "k_norm")  # all that may be centred
FIELD = "model_path"  # the field that names a folder, for messages


class ModelError(ValueError):
    """A model folder that cannot be served; the message names the file."""


Shape = Architecture | TextShape


def read_shape(folder: Path) -> Shape:
    """The architecture of a checkpoint folder; of an unknown family, what transformers' model needs.

    Raises ModelError if the engine cannot serve what its config.json says.
    """
    try:
        return shape_of(str(folder), FIELD) or text_shape(folder, FIELD)
    except ConfigError as error:
        raise ModelError(str(error)) from error


def read_tensors(folder: Path, shape: Shape, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The model's tensors from a checkpoint folder, as `dtype`; None: the stored dtype of the embedding.

    Raises ModelError naming the first tensor that is missing, unexpected or does not fit.
    """
    if isinstance(shape, TextShape):
        return stored_tensors(folder, dtype)
    try:
        folder_tensors = FolderTensors(str(folder), shape, FIELD)
        tensors = {name: folder_tensors[name] for name in folder_tensors.stored}
    except ConfigError as error:
        raise ModelError(str(error)) from error
    wanted = dtype or tensors[family_named(shape.family).embedding].dtype
    exact = folder_tensors.kept
    return {name: tensor.to(torch.float32 if name in exact else wanted) for name, tensor in tensors.items()}


class Weights:
    """Named tensors, and their fused copies for the forward pass."""

    def __init__(self, shape: Architecture, tensors: dict[str, Tensor]) -> None:
        self.shape = shape
        assert tensors.keys() == tensor_shapes(shape).keys(), "read_tensors and updates by name see to that"
        self.tensors = tensors
        stacked = [part for part in family_named(shape.family).layer if part.stacked and shape.has(part)]
        self._parts = {part.parameter.split(".experts.")[1]: part for part in stacked}
        self._by_key_head = any(part.form == "key_heads" for part in family_named(shape.family).layer)
        self.layers = [self._layer(number) for number in range(shape.layers)]
        self.embedding = tensors[family_named(shape.family).embedding]
        self.norm = self._scale(self._one("final_layernorm.weight", 0))
        self.head = self.embedding if shape.tied else tensors[HEAD]
        self.dtype = self.embedding.dtype

    def _layer(self, number: int) -> dict[str, Any]:
        layer = {name: self._one(parameter, number) for name, parameter in LAYER.items()}
        layer |= {name: self._scale(layer[name]) for name in NORMS}
        if self.shape.delta and number in self.shape.delta_layers:
            rows, *others = (self._one(f"self_attention.{name}", number) for name in DELTA)
            rows = rows[self.shape.delta.rows_by_key_head()] if self._by_key_head else rows
            layer["delta"] = DeltaWeights(self.shape.delta, rows, *others)
        if number in self.shape.expert_layers:
            layer["choice_bias"] = self._one("mlp.router.expert_bias", number)
            layer["router_bias"] = self._one("mlp.router.bias", number)
            layer["router"] = self._one("mlp.router.weight", number)
            one = "local_experts.{expert}"
            layer["experts"] = [self._mlp(one, number, expert) for expert in range(self.shape.experts)]
            if self.shape.shared_ffn:
                layer["shared"] = self._mlp("shared_experts", number)
                layer["shared_gate"] = self._one("shared_experts.gate_weight", number)
        else:
            layer["mlp"] = self._mlp("mlp", number)
        return layer

    def _scale(self, weight: Any) -> Any:
        """What a norm multiplies with; None without a norm."""
        return weight if weight is None or not self.shape.centred else 1 + weight.float()

    def _mlp(self, place: str, layer: int, expert: int = 0) -> FeedForward:
        gate_up, up_bias, down, down_bias = (
            self._one(f"{place}.linear_{name}", layer, expert)
            for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
        )
        return FeedForward(gate_up, up_bias, down, down_bias, self.shape.swiglu_limit)

    def _of(self, parameter: str, layer: int = 0, expert: int = 0) -> list[Tensor]:
        """The tensors that make a parameter."""
        names = stored_names(self.shape, parameter, layer=layer, expert=expert)
        tensors = [self.tensors[name] for name in names]
        part = self._parts.get(parameter)
        return [part.of_expert(t[expert]).contiguous() for t in tensors] if part else tensors

    def _one(self, parameter: str, layer: int, expert: int = 0) -> Any:
        """A parameter, its tensors one after the other; None if the family has none."""
        tensors = self._of(parameter, layer, expert)
        return torch.cat(tensors) if len(tensors) > 1 else next(iter(tensors), None)


@dataclass(frozen=True)
class FeedForward:
    """A gated MLP, or an expert. limit: as Architecture.swiglu_limit."""

    gate_up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    limit: float

    def __call__(self, x: Tensor, rows: RowAdapters = NO_ADAPTERS, layer: int = 0, place: str = "") -> Tensor:
        """[rows, hidden] -> [rows, hidden]. rows: the adapters of the rows; layer, place: whose MLP it is, for these."""
        both = rows.add(layer, f"{place}gate_up", x, F.linear(x, self.gate_up, self.up_bias))
        gate, up = both.chunk(2, dim=-1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            inner = gate * torch.sigmoid(GATE_SLOPE * gate) * (up + 1)
        else:
            inner = F.silu(gate) * up
        return rows.add(layer, f"{place}down", inner, F.linear(inner, self.down, self.down_bias))


Pair = tuple[Tensor, Tensor]


class Cache:
    """Keys and values by layer and slot: [slots, kv_heads, capacity, head_dim or value_dim] each, also of latent attention.

    A delta net layer has its window and state instead, which have no positions.
    """

    def __init__(self, shape: Shape, slots: int, capacity: int, dtype: torch.dtype) -> None:
        self.capacity, self.slots = capacity, slots
        self._delta = shape.delta_layers
        size = (slots, shape.kv_heads, capacity)
        self.layers: list[Pair] = [
            empty_memory(shape.delta, slots, dtype)
            if shape.delta and number in self._delta
            else (
                torch.zeros(*size, shape.head_dim, dtype=dtype),
                torch.zeros(*size, shape.value_dim, dtype=dtype),
            )
            for number in range(shape.layers)
        ]

    def fill(self, slot: int, layers: list[Pair], length: int) -> None:
        """Let a slot hold a text of `length` tokens. Positions behind are masked with weight 0, but 0 times a leftover NaN is NaN."""
        for number, tensors in enumerate(layers):
            for mine, given in zip(self.layers[number], tensors, strict=True):
                self.held(number, mine[slot], length).copy_(given)
                if number not in self._delta:
                    mine[slot, :, length:] = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's text of `length` tokens to another slot."""
        for number, tensors in enumerate(self.layers):
            for tensor in tensors:
                self.held(number, tensor[target], length).copy_(self.held(number, tensor[source], length))

    def take(self, other: Cache, slots: int) -> None:
        """Copy the first `slots` slots of another cache, up to the smaller capacity."""
        length = min(self.capacity, other.capacity)
        for number, tensors in enumerate(self.layers if slots else []):
            for mine, theirs in zip(tensors, other.layers[number], strict=True):
                self.held(number, mine[:slots], length).copy_(self.held(number, theirs[:slots], length))

    def held(self, number: int, tensor: Tensor, length: int) -> Tensor:
        """The part of a layer's tensor that texts of `length` tokens use."""
        return tensor if number in self._delta else tensor[..., :length, :]


class Decoder:
    """Prefill and decode."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """The type of keys and values."""
        return self.weights.dtype

    def __init__(self, weights: Weights) -> None:
        self.shape = weights.shape
        self.weights = weights
        half = torch.arange(0, self.shape.rotary, 2, dtype=torch.float32) / self.shape.rotary
        turns = self.shape.rope_theta**-half
        scaling = self.shape.rope_scaling
        if scaling:
            turns = scaling.scaled(turns, self.shape.rope_theta)
        frequencies = torch.outer(torch.arange(self.shape.positions, dtype=torch.float32), turns)
        both = frequencies.repeat_interleave(2, dim=-1)
        if not self.shape.interleaved:
            both = torch.cat([frequencies, frequencies], dim=-1)
        factor = scaling.table_factor if scaling else 1.0
        self.cos, self.sin = both.cos() * factor, both.sin() * factor

    def see(self, sections: tuple[int, int, int], interleaved: bool) -> None:
        """Let rotary positions have three axes: by which of them each pair of a head's dimensions turns."""
        axes = torch.zeros(self.shape.rotary // 2, dtype=torch.long)
        starts = (0, sections[0], sum(sections[:2]))
        for axis, (start, count) in enumerate(zip(starts, sections, strict=True)):
            if interleaved:
                axes[axis : 3 * count : 3] = axis
            else:
                axes[start : start + count] = axis
        self._axes = torch.cat([axes, axes])

    def _turned(self, seen: Sequence[SeenImages | None], length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, length, rotary] of texts, of which some have pictures."""
        plain = torch.arange(length).expand(3, -1)
        places = torch.stack([plain if one is None else one.at(length) for one in seen])
        places = places[:, self._axes].transpose(1, 2)  # [B, length, rotary]
        cos, sin = (
            table.gather(0, places.flatten(0, 1)).view(places.shape)[:, None]
            for table in (self.cos, self.sin)
        )
        return cos, sin

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        adapters: Sequence[Adapter | None] = (),
        seen: Sequence[SeenImages | None] = (),
    ) -> tuple[Tensor, list[Pair], Tensor]:
        """tokens [B, S] with S a multiple of PREFILL_SPAN -> final hidden states [B, S, H], what a Cache holds of them by layer, and
        the tokens' experts [B, S, layers with experts, k]. lengths: of the texts [B], with which tokens start; None: all are S.
        adapters: of each of the B; by default none. seen: the pictures of each text, if one has some."""
        batch, length = tokens.shape
        rows = RowAdapters(adapters, each=length)
        assert length % PREFILL_SPAN == 0
        cos, sin = self._turned(seen, length) if any(seen) else (self.cos[:length], self.sin[:length])
        cached: list[Pair] = []
        ends = torch.full((batch,), length) if lengths is None else lengths

        def remember(number: int, x: Tensor) -> Tensor:
            delta: DeltaWeights = self.weights.layers[number]["delta"]
            memory = empty_memory(delta.sizes, batch, x.dtype)
            out, *memory_then = delta.read(x.unflatten(0, (batch, length)), *memory, ends, self.shape.eps)
            cached.append((memory_then[0], memory_then[1]))
            return out.flatten(0, 1)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v))
            q, k = (_rotate(x, cos, sin, self.shape.interleaved) for x in (q, k))
            cached.append((k, v))
            mask, window, sinks = None, self.shape.windows[number], self.weights.layers[number]["sinks"]
            if 0 < window < length or sinks is not None:
                mask = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - (window or length))
            scale = self.shape.score_factor
            if mask is not None and sinks is not None:
                out = _attend_plainly(q, k, v, mask, scale, sinks)
                return out.transpose(1, 2).reshape(batch * length, -1)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(batch * length, -1)

        embedded = self.weights.embedding[tokens.reshape(-1)]
        pictures = [(one.places + row * length, one.features) for row, one in enumerate(seen) if one]
        for places, (features, *_) in pictures:
            embedded[places] = features

        def add(number: int, x: Tensor) -> Tensor:
            for places, (_, *later) in pictures:
                if number < len(later):
                    x[places] += later[number]
            return x

        hidden, experts = self._layers(embedded, attend, remember, rows, add)
        return hidden.view(batch, length, -1), cached, experts.unflatten(0, (batch, length))

    @torch.inference_mode()
    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        adapters: Sequence[Adapter | None] = (),
        turns: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Next hidden states [M, H] of slots 0..M-1, and experts [M, layers with experts, k], given each slot's last token [M] and
        its position [M]. adapters: of the first slots. turns: rotary positions [M], if a text with pictures has others."""
        count = len(tokens)
        assert count % ROWS == 0
        span = min(cache.capacity, rounded_up(int(positions.max()) + 1, SPAN))
        turns = positions if turns is None else turns
        cos, sin = self.cos[turns][:, None, None], self.sin[turns][:, None, None]
        distances = (positions[:, None] - torch.arange(span))[:, None, None]
        slots = torch.arange(count)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[:, :, None] for x in (q, k, v))
            q, k = (_rotate(x, cos, sin, self.shape.interleaved) for x in (q, k))
            keys, values = cache.layers[number]
            keys[slots, :, positions] = k[:, :, 0]
            values[slots, :, positions] = v[:, :, 0]
            mask = (distances >= 0) & (distances < (self.shape.windows[number] or span))
            scale, sinks = self.shape.score_factor, self.weights.layers[number]["sinks"]
            out = _attend_plainly(q, keys[:count, :, :span], values[:count, :, :span], mask, scale, sinks)
            return out.reshape(count, -1)

        def remember(number: int, x: Tensor) -> Tensor:
            delta: DeltaWeights = self.weights.layers[number]["delta"]
            memory = [tensor[:count] for tensor in cache.layers[number]]
            one = torch.ones(count, dtype=torch.long)
            out, *memory_then = delta.read(x[:, None], memory[0], memory[1], one, self.shape.eps)
            for tensor, then in zip(memory, memory_then, strict=True):
                tensor.copy_(then)
            return out.flatten(0, 1)

        return self._layers(self.weights.embedding[tokens], attend, remember, RowAdapters(adapters))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [M, V] of hidden states [M, H]."""
        return padded_linear(hidden, self.weights.head).float()

    def _layers(
        self, x: Tensor, attend: Any, remember: Any, rows: RowAdapters, add: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Final hidden states [M, H], and the experts of each token [M, layers with experts, k], of embeddings [M, H].

        add: called after each layer with its number and hidden states.
        """
        s = self.shape
        routed = []
        for number, layer in enumerate(self.weights.layers):
            normed = _norm(x, layer["norm1"], s.eps)
            attended = (
                self._attended(number, normed, layer, attend, rows)
                if "delta" not in layer
                else remember(number, normed)
            )
            if s.branch_norms:
                attended = _norm(attended, layer["attended_norm"], s.eps)
            x = x + attended
            normed = _norm(x, layer["norm2"], s.eps)
            if "experts" in layer:
                weights, chosen = self._routed(normed, layer)
                routed.append(chosen)
                fed = self._experts(normed, layer, weights, chosen, rows, number)
            else:
                fed = layer["mlp"](normed, rows, number)
            if s.branch_norms:
                fed = _norm(fed, layer["fed_norm"], s.eps)
            x = x + fed
            x = add(number, x) if add else x
        experts = torch.stack(routed, dim=1) if routed else torch.zeros(len(x), 0, 0, dtype=torch.long)
        return _norm(x, self.weights.norm, s.eps), experts

    def _attended(
        self, number: int, x: Tensor, layer: dict[str, Any], attend: Any, rows: RowAdapters
    ) -> Tensor:
        """What attention gives [M, H] of hidden states [M, H]."""
        if self.shape.kv_rank:
            q, k, v, *gate = self._heads_of_latents(x, layer)
        else:
            mixed = F.linear(x, layer["qkv"], layer["bias"])
            q, k, v, *gate = self._heads(rows.add(number, "qkv", x, mixed), layer)
        out = attend(number, q, k, v)
        if gate:
            out = out * gate[0].flatten(1).sigmoid()
        return rows.add(number, "o", out, F.linear(out, layer["o"], layer["o_bias"]))

    def _heads(self, mixed: Tensor, layer: dict[str, Any]) -> tuple[Tensor, ...]:
        """Queries, keys and values [M, heads, d] of their joint projection, and the logits of gates if there are any."""
        s = self.shape
        heads = mixed.unflatten(-1, (-1, s.head_dim))
        q, k, v = heads.split([s.heads * (2 if s.output_gate else 1), s.kv_heads, s.kv_heads], dim=1)
        gate = [q[:, 1::2]] if s.output_gate else []
        q = q[:, ::2] if s.output_gate else q
        if layer["q_norm"] is not None:
            q, k = _norm(q, layer["q_norm"], s.eps), _norm(k, layer["k_norm"], s.eps)
        return q, k, v, *gate

    def _heads_of_latents(self, x: Tensor, layer: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The same of latent attention, of hidden states [M, H]. What rotates comes first in a head, which changes no score."""
        s = self.shape
        if s.q_rank:
            q = F.linear(_norm(F.linear(x, layer["q_down"]), layer["q_norm"], LATENT_EPS), layer["q_up"])
        else:
            q = F.linear(x, layer["q_direct"])
        latent, position = F.linear(x, layer["kv_down"]).split([s.kv_rank, s.rotary], dim=-1)
        both = F.linear(_norm(latent, layer["kv_norm"], LATENT_EPS), layer["kv_up"]).unflatten(
            -1, (s.heads, -1)
        )
        k, v = both.split([s.head_dim - s.rotary, s.value_dim], dim=-1)
        k = torch.cat([position[:, None].expand(-1, s.heads, -1), k], dim=-1)
        return q.unflatten(-1, (s.heads, -1)).roll(s.rotary, -1), k, v

    def _experts(
        self,
        x: Tensor,
        layer: dict[str, Any],
        top: Tensor,
        chosen: Tensor,
        adapters: RowAdapters,
        at: int,
    ) -> Tensor:
        """Mixture of experts [M, H] of layer `at`, given each token's experts and their weights [M, k]. Each expert's rows are
        padded, so that results do not depend on other rows that chose it."""
        parts = torch.zeros(*chosen.shape, x.shape[-1], dtype=x.dtype)
        for number, expert in enumerate(layer["experts"]):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                padding = rounded_up(len(rows), ROWS) - len(rows)
                inputs = torch.cat([x[rows], x.new_zeros(padding, x.shape[-1])])
                own = adapters.at(rows, len(x))
                parts[rows, places] = expert(inputs, own, at, f"{number}.")[: len(rows)]
        out = torch.zeros_like(x)
        for place in range(chosen.shape[1]):
            out = out + parts[:, place] * top[:, place, None].to(x.dtype)
        if "shared" in layer:
            shared = layer["shared"](x, adapters, at, "shared.")
            if layer["shared_gate"] is not None:
                shared = padded_linear(x, layer["shared_gate"]).sigmoid() * shared
            out = out + shared
        return out

    def _routed(self, x: Tensor, layer: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token."""
        s = self.shape
        if s.routing is not None:
            logits = F.linear(x.float(), layer["router"].float())
            chosen = s.routing.chosen(logits, layer["choice_bias"], s.experts_used)
            return s.routing.weights(logits, chosen, normalised=s.norm_topk), chosen
        scores = F.linear(x, layer["router"], layer["router_bias"]).float().softmax(-1)
        top, chosen = scores.topk(s.experts_used, dim=-1)
        return top / top.sum(-1, keepdim=True) if s.norm_topk else top, chosen


AnyWeights = Weights | TransformersWeights
AnyDecoder = Decoder | TransformersDecoder


def make_weights(shape: Shape, tensors: dict[str, Tensor], folder: Path) -> AnyWeights:
    """The weights of a model in this form. folder: of the model that is served."""
    if isinstance(shape, TextShape):
        return TransformersWeights(shape, tensors, folder)
    return Weights(shape, tensors)


def make_decoder(weights: AnyWeights) -> AnyDecoder:
    """What computes with these weights."""
    return TransformersDecoder(weights) if isinstance(weights, TransformersWeights) else Decoder(weights)


def rounded_up(count: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `count`."""
    return -(-count // step) * step


def padded_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with at least ROWS rows in the product."""
    rows = x.shape[0]
    padded = rounded_up(rows, ROWS)
    if padded != rows:
        x = torch.cat([x, x.new_zeros(padded - rows, x.shape[1])])
    return F.linear(x, weight)[:rows]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def _attend_plainly(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of queries [M, heads, n, d], with mask [..., n, keys]. Uses plain products: fused kernels split the work among
    threads so that the last bits change with the number of slots. sinks: [heads], logits of a key without a value."""
    count, heads, rows, width = q.shape
    kv_heads = keys.shape[1]
    times = heads // kv_heads
    scores = q.reshape(count, kv_heads, times * rows, width) @ keys.transpose(-1, -2) * (scale or width**-0.5)
    if rows > 1:
        mask = torch.cat([mask] * times, dim=-2)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if sinks is not None:
        of_rows = sinks.float().view(kv_heads, times, 1).repeat_interleave(rows, 1)
        scores = torch.cat([scores, of_rows.expand(count, -1, -1, -1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    attended: Tensor = weights @ values
    return attended.view(count, heads, rows, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    out = (x * cos.to(x.dtype) + turned * sin.to(x.dtype)).to(x.dtype)
    return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out
