"""Imported before trainer ranks of the tests are forked: loads what a rank needs, under the environment that it needs then."""

from __future__ import annotations

import os
import sys
import warnings

from millrace.connectors.trainers.fsdp.rank import FsdpRank
from millrace.connectors.trainers.megatron.rank import TrainerRank

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
warnings.simplefilter("ignore")
TrainerRank({}, 0, 1).prepare()
FsdpRank({}, 0, 1).prepare()
PREPARED = frozenset(sys.modules)

import pandas  # noqa: E402, F401 pyarrow loads it when a rank reads its first batch
