"""Gated delta net: attention that remembers a text in one matrix a head (Yang et al., arXiv:2412.06464), in some layers of a model.

Which layers have it, their sizes, and the order of the rows of their projection. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

FULL, LINEAR = "full_attention", "linear_attention"  # in layer_types
LAYER_KEYS = ("layer_types", "full_attention_interval")  # keys that are read here
DEFAULT_INTERVAL = 4  # transformers' full_attention_interval
CHUNK = 64  # tokens that the trainer computes at once
EPS = 1e-6  # under the root of the lengths of keys and queries

Refuse = Callable[[str, Any, str], NoReturn]
"""Raises the error for a key, its value and what is wrong with it."""


@dataclass(frozen=True)
class DeltaNet:
    """The delta net layers of a model. Each key head serves the same number of value heads."""

    layers: tuple[int, ...]  # their numbers; the others attend to all keys
    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    kernel: int  # tokens of the short convolution
    interval: int = DEFAULT_INTERVAL  # of full_attention_interval, which `layers` may contradict

    def by_interval(self, layers: int) -> bool:
        """Whether every `interval`-th of the model's layers attends to all keys, and no other. SGLang goes by that alone."""
        return self.layers == tuple(layer for layer in range(layers) if (layer + 1) % self.interval)

    @property
    def keys(self) -> int:
        """The width of all keys together, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all values together, and of their gates."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The width that the convolution takes: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    def sizes(self, layer: int | None) -> dict[str, int]:
        """As `Architecture.sizes`; all are 0 for other layers."""
        sizes = {
            "delta_keys": self.keys,
            "delta_values": self.values,
            "delta_channels": self.channels,
            "delta_by_head": self.channels + self.values,
            "delta_heads": self.value_heads,
            "delta_scalars": 2 * self.value_heads,
            "delta_head": self.value_dim,
            "delta_kernel": self.kernel,
            "delta_one": 1,
        }
        return {name: size if layer in self.layers else 0 for name, size in sizes.items()}

    def rows_by_key_head(self) -> list[int]:
        """Where each row of [queries, keys, values, gates, betas, decays] is in two tensors, one after the other, that are ordered
        by key head: [query, key, values, gates] of each, then [betas, decays] of each."""
        rows: list[int] = []
        first, wide = 0, self.ratio * self.value_dim
        for block in ((self.key_dim, self.key_dim, wide, wide), (self.ratio, self.ratio)):
            start = first
            for size in block:
                heads = range(start, start + self.key_heads * sum(block), sum(block))
                rows += [head + row for head in heads for row in range(size)]
                start += size
            first += self.key_heads * sum(block)
        return rows

    @property
    def kept(self) -> int:
        """Numbers a token that a layer keeps for its backward pass, beside what it takes and gives."""
        return 5 * self.channels + 6 * self.values

    @property
    def at_once(self) -> int:
        """Numbers a token, in float32, that one layer computes with in its backward pass: its chunks, and their gradients."""
        return 2 * self.value_heads * (6 * self.key_dim + 5 * self.value_dim + 3 * CHUNK)

    def flops(self, tokens: int) -> int:
        """Operations of one layer's forward pass over a sequence, beside its products with weights, in chunks of CHUNK tokens."""
        scores = self.key_heads * 4 * CHUNK * self.key_dim  # of keys with keys, and of queries with keys
        solved = CHUNK * (
            self.key_dim + 3 * self.value_dim
        )  # a triangular system, and what the chunk's queries read
        remembered = 6 * self.key_dim * self.value_dim
        return tokens * (scores + self.value_heads * (solved + remembered) + 2 * self.kernel * self.channels)


def linear_layers(config: Mapping[str, Any], layers: int, refuse: Refuse) -> list[int]:
    """Numbers of the delta net layers, by layer_types, or by full_attention_interval without them."""
    every: Any = config.get("full_attention_interval", DEFAULT_INTERVAL)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        refuse("full_attention_interval", every, "a number of layers, at least 1, is wanted")
    kinds: Any = config.get("layer_types")
    if kinds is None:
        return [layer for layer in range(layers) if (layer + 1) % every]
    if not isinstance(kinds, list) or len(kinds) != layers or not {FULL, LINEAR}.issuperset(kinds):
        refuse("layer_types", kinds, f"{FULL} or {LINEAR} is wanted for each of {layers} layers")
    return [layer for layer, kind in enumerate(kinds) if kind == LINEAR]
