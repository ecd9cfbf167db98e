"""Scaled rotary embeddings: what a model that was trained on short texts does to its frequencies to read longer ones.

Each is fixed when the model is built. Kinds that depend on the length of a text while it is read are not here: engines and
trainers differ in when they change. No torch: frequencies are whatever tensor the caller has.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol


class RotaryScaling(Protocol):
    """One kind of scaling. Its fields are named as in a config.json's mapping."""

    @property
    def table_factor(self) -> float:
        """Factor of the table's cosines and sines; its square is a factor of the attention scores."""
        ...

    @property
    def score_factor(self) -> float:
        """A further factor of the attention scores, of whole heads: also of what does not rotate."""
        ...

    def scaled(self, frequencies: Any, theta: float) -> Any:
        """The scaled frequencies, radians a position, from the base theta's."""
        ...


@dataclass(frozen=True)
class LinearScaling:
    """Every wave is `factor` times as long: positions between the known ones (arXiv:2306.15595)."""

    factor: float

    table_factor = score_factor = 1.0

    def scaled(self, frequencies: Any, theta: float) -> Any:
        """See RotaryScaling."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: short waves stay, long ones are stretched.

    A wave that fits `high_freq_factor` times and more into `original_max_position_embeddings` positions stays unchanged. A
    wave that fits at most `low_freq_factor` times becomes `factor` times as long; between the two the frequency is
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    table_factor = score_factor = 1.0

    def scaled(self, frequencies: Any, theta: float) -> Any:
        """See RotaryScaling."""
        fits = frequencies * (self.original_max_position_embeddings / (2 * math.pi))
        stays = ((fits - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (stays + (1 - stays) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, section 3): as Llama 3.1's, with a ramp over dimensions, and sharper attention.

    A wave that fits `beta_fast` times and more into the original positions stays, one that fits `beta_slow` times becomes
    `factor` (at least 1) times as long. The ends of the ramp are whole dimensions if `truncate`. Attention scores grow with the square of 0.1 ln(factor) + 1.
    DeepSeek weighs the logarithm, by `mscale` where heads rotate and by `mscale_all_dim` in whole heads.
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def table_factor(self) -> float:
        """See RotaryScaling; equation 22 of the paper."""
        return self._grown(self.mscale) / self._grown(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """See RotaryScaling."""
        return self._grown(self.mscale_all_dim) ** 2

    def _grown(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1

    def scaled(self, frequencies: Any, theta: float) -> Any:
        """See RotaryScaling."""
        half = len(frequencies)
        low, high = (self._dimension(beta, half, theta) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        width = max(high - low, 0.001)
        ramp = frequencies.new_tensor([min(max((place - low) / width, 0.0), 1.0) for place in range(half)])
        return frequencies * (1 - ramp) + frequencies / self.factor * ramp

    def _dimension(self, turns: float, half: int, theta: float) -> float:
        """The place among `half` frequencies whose wave makes so many turns within the original positions."""
        return (
            half * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
        )


KINDS: dict[str, type[LinearScaling | Llama3Scaling | YarnScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
