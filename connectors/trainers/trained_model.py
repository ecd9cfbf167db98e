"""What a learner asks of a model that is trained: its gradients, its optimizer and its schedule."""

import contextlib
from typing import Any, Protocol

from millrace.core.replay import StepNumbers


class TrainedModel(Protocol):
    """A model with its optimizer and learning-rate schedule."""

    lr: float  # learning rate of the last step
    inner: Any  # the module with the parameters
    optimizer: Any
    schedule: Any  # with state_dict()

    def zero_grad(self) -> None:
        """Set gradients to zero, also after a refused step."""

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes add to this rank's gradients; the step's last passes reduce them over ranks."""

    def divide_gradient(self, denominator: float) -> None:
        """Divide the gradients, which are summed over ranks, before they are measured."""

    def measure_gradient(self) -> None:
        """Launch the gradient norm on the device, if it can be; `gradient_norm` then only reads it."""

    def gradient_norm(self) -> float:
        """Norm of the gradient before clipping; changes nothing."""

    def step(self, made_with: StepNumbers | None = None) -> None:
        """Advance optimizer and schedule, after `gradient_norm`: step n uses the schedule's rate after n - 1 steps.

        made_with: the recorded numbers of a step that is repeated; they replace the configuration's.
        """

    def skip(self) -> None:
        """Advance only the schedule."""

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of tensors that this rank saves."""
