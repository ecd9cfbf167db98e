"""The type that a trainer computes in, and whose weights engines and exports get."""

import torch

from millrace.core.config import RunConfig


def compute_type(config: RunConfig) -> torch.dtype:
    """PyTorch's type of model.dtype."""
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
