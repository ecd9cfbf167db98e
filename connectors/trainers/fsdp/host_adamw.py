"""AdamW on the host for a fraction of the parameters that FSDP cuts over ranks.

The fp32 weights on the GPU stay, since FSDP gathers blocks from them. The host has the moments, and the weights once more: a step
reads them there, and the GPU gets the new ones.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from millrace.connectors.trainers.frozen_models import held
from millrace.connectors.trainers.host_adamw import CHUNK, HostSteps, chunks_of, first_of


class ParameterShard:
    """What this rank has of a parameter, flat. gradient: of the step that is being made."""

    def __init__(self, parameter: Parameter) -> None:
        self.parameter = parameter
        self.gradient: Tensor | None = None
        self.main = self.target

    @property
    def target(self) -> Tensor:
        """The weights on the GPU."""
        return held(self.parameter).view(-1)


class ShardedHostAdamW(HostSteps):
    """Steps the first parameters on the CPU, until they are a `fraction` of this rank's elements."""

    def __init__(
        self, parameters: Sequence[Parameter], fraction: float, threads: int | None, chunk: int = CHUNK
    ) -> None:
        """threads: see HostSteps. chunk: elements stepped at once.

        Every rank must call it. Raises TrainerMemoryError if the host has no memory for the state.
        """
        self.shards = first_of([ParameterShard(each) for each in parameters], fraction)
        self.parameters = {shard.parameter for shard in self.shards}
        self._chunk = chunk
        elements = sum(shard.main.numel() for shard in self.shards)
        super().__init__(elements, threads, on_gpu=parameters[0].is_cuda)

    def take_over(self, optimizer: Any) -> None:
        """Step these parameters of an AdamW from now on: their moments, which must be there, come to the host."""
        groups = {each: group for group in optimizer.param_groups for each in group["params"]}
        self._states = {each: optimizer.state[each] for each in self.parameters}
        with self.many_threads():
            for shard in self.shards:
                state = self._states[shard.parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = _on_host(state[name])
                state["step"] = state["step"].cpu()
                shard.main = shard.target.to("cpu", copy=True)
        self.chunks = list(chunks_of(self.shards, lambda shard: groups[shard.parameter], self._chunk))
        self._allocate(self.chunks)

    def read_weights(self) -> None:
        """Take the weights that the model has now."""
        for shard in self.shards:
            shard.main.copy_(shard.target)

    def step(self, clip: float) -> None:
        """One step on the parameters' gradients, clipped. Their gradients are gone then, so that nothing else steps them."""
        for shard in self.shards:
            gradient = shard.parameter.grad
            shard.gradient = None if gradient is None else held(gradient).view(-1)
        if self.chunks:
            self._step(self.chunks, lambda shard: _flat(self._states[shard.parameter]), clip)
        for shard in self.shards:
            if shard.gradient is not None:
                self._states[shard.parameter]["step"] += 1
            shard.gradient = shard.parameter.grad = None


def _flat(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: held(value).view(-1) if value.ndim else value for name, value in state.items()}


def _on_host(moment: Tensor) -> Tensor:
    """The same values in the host's memory, cut over ranks as before."""
    own = held(moment).to("cpu")
    if not isinstance(moment, DTensor):
        return own
    # not DTensor.from_local, which moves values to the mesh's devices
    whole: Tensor = DTensor(own, moment._spec, requires_grad=False)
    return whole
