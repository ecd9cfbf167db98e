"""Property tests here: no deadlines (shared machines stall), the same examples every time."""

import torch
from hypothesis import settings

settings.register_profile("core", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("core")
torch.set_num_threads(2)
