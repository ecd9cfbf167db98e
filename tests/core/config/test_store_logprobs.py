"""`trainer.store_logprobs`: the losses and modes that it goes with, and those that it is refused with. A loss without a row fails."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from millrace.core.config.algorithm import loss as losses
from millrace.core.config.parts.section import Section
from tests.core.config.test_rules import fields

STORES = "trainer.store_logprobs=true"
WEIGHED = "algorithm.correction.kind=truncate"
LOSSES: dict[str, list[str]] = {
    "clipped": [],
    "gspo": ["algorithm.preset=gspo"],
    "cispo": ["algorithm.preset=cispo"],
    "sapo": ["algorithm.loss=sapo"],
    "reinforce": ["algorithm.loss=reinforce"],
    "function": ["algorithm.loss={kind: function, function: 'package.module:name'}"],
}
SUPERVISED = ["algorithm.loss=sft", "rollout.samples_per_prompt=1"]
MODES: dict[str, list[str]] = {
    "several steps": ["trainer.global_batch=16"],
    "several passes": ["trainer.passes=2"],
    "in chunks": ["pipeline.eager=true"],
    "ahead": ["pipeline.ahead=1", WEIGHED],
    "the first to finish": ["pipeline.select=finish", "pipeline.max_staleness=1", WEIGHED],
    "reused": ["rollout.buffer={share: 0.25}", WEIGHED],
    "a critic": ["algorithm.preset=ppo"],
    "the engine's as old ones": ["algorithm.old_logprobs=rollout"],
    "shared GPUs": ["placement.colocate=true", "engines.kind=sglang", "trainer.device=cuda"],
}


def test_every_loss_has_a_row() -> None:
    kinds = {
        get_args(get_type_hints(each)["kind"])[0]
        for each in vars(losses).values()
        if isinstance(each, type) and issubclass(each, Section) and "kind" in each.model_fields
    }
    assert kinds == {*LOSSES, "sft"}


@pytest.mark.parametrize("overrides", [*LOSSES.values(), *MODES.values()], ids=" ".join)
def test_what_samples_and_trains_goes_with_it(overrides: list[str]) -> None:
    assert fields(*overrides) == fields(*overrides, STORES) == []


def test_supervised_training_is_refused_by_name() -> None:
    assert fields(*SUPERVISED) == []
    assert fields(*SUPERVISED, STORES) == ["trainer.store_logprobs"]
