"""What a run with pictures does not do is refused by the field's name, and nothing else is."""

from __future__ import annotations

import pytest

from millrace.core.config.data import image_rules
from tests.core.config.test_rules import config, fields

SEES, HELD = "evaluation.sets.0.images_key=images", "evaluation.sets.held.images_key"
SUPERVISED = "algorithm.loss=sft"
TRAINS, TRAINED = "data.sources.0.images_key=images", "data.sources.sums.images_key"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["evaluation.sets.0.samples_per_prompt=4"],
        ["engines.kind=sglang"],
        ["placement={task_runner: ray, ray_address: 'head:6379'}"],
        ["pipeline={ahead: 1, max_staleness: 1}", "algorithm.correction.kind=truncate"],
        ["data.max_image_tokens=64"],
        [TRAINS, "trainer.kind=fsdp"],
        [TRAINS, "trainer.kind=fsdp", SUPERVISED, "rollout.samples_per_prompt=1"],
    ],
)
def test_a_set_of_pictures_is_taken(overrides: list[str]) -> None:
    assert fields(SEES, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "refused", "said"),
    [
        (["evaluation.sets.0.chat=false"], "evaluation.sets.held.chat", "chat template"),
        ([TRAINS], TRAINED, "trainer.kind: megatron-core's trainer reads text alone"),
        ([TRAINS, "trainer.rank=m:Rank"], TRAINED, "trainer.rank: "),
        ([TRAINS, "trainer.lora={}"], TRAINED, "trainer.lora: "),
        ([TRAINS, "algorithm={preset: opd, teacher: other}"], TRAINED, "algorithm.teacher: "),
        ([TRAINS, "algorithm={kl_coef: 0.1, reference: other}"], TRAINED, "algorithm.reference: "),
        (
            [SUPERVISED, "rollout.samples_per_prompt=1"],
            HELD,
            "trainer.kind: megatron-core's trainer reads text alone",
        ),
        (
            [SUPERVISED, "trainer.kind=fsdp", "evaluation.sets.0.loss_on=assistant"],
            "evaluation.sets.held.loss_on",
            "dialogues with pictures",
        ),
        (["rollout.session={tools: ['m:f'], max_tokens: 100}"], HELD, "rollout.session: "),
        (["rollout.routing_replay=true"], HELD, "rollout.routing_replay: "),
        (["engines={kind: embedded, count: 2, router: {}}"], HELD, "engines.router: "),
        (["engines={kind: sglang, count: 3, prefill: 2}"], HELD, "engines.prefill: "),
        (
            ["algorithm={preset: opd, teacher_server: {url: 'http://host/v1', protocol: vllm, model: t}}"],
            HELD,
            "algorithm.teacher_server: ",
        ),
        (["pipeline.rollouts_from=other"], HELD, "pipeline.rollouts_from: "),
    ],
)
def test_what_reads_text_alone_is_refused(overrides: list[str], refused: str, said: str) -> None:
    found = [problem for problem in image_rules.problems(config(SEES, *overrides)) if said in str(problem)]
    assert [problem.field for problem in found] == [refused]
    assert all(problem.remedy for problem in found)
    without = [override for override in overrides if "images_key" not in override]
    assert list(image_rules.problems(config(*without))) == []
