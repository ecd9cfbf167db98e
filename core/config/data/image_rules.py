"""Rules of `images_key`: what is made of text alone, and is refused for prompts with pictures."""

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig


def problems(config: RunConfig) -> Iterator[Problem]:
    """Settings that prompts with pictures contradict."""
    training = [(f"data.sources.{source.name}", source) for source in config.data.sources]
    held_out = [(f"evaluation.sets.{each.name}", each) for each in config.evaluation.sets]
    seen_by_trainer = [*training, *(held_out if config.algorithm.supervised else ())]
    elsewhere = _elsewhere(config)
    for place, source in (*training, *held_out):
        if not source.images_key:
            continue
        field = f"{place}.images_key"
        if not source.chat:
            yield Problem(
                f"{place}.chat",
                False,
                "the chat template writes the places of pictures",
                "set it to true, or images_key to null",
            )
        if source.loss_on != "answer":
            yield Problem(
                f"{place}.loss_on",
                source.loss_on,
                "dialogues with pictures are not trained on",
                "set it to answer, with the answer in label_key, or images_key to null",
            )
        if (place, source) in seen_by_trainer:
            for other, reason in _untrained(config).items():
                yield Problem(
                    field,
                    source.images_key,
                    f"{other}: {reason}",
                    f"set it to null, or {other} to another value",
                )
        for other, reason in elsewhere.items():
            yield Problem(
                field, source.images_key, f"{other}: {reason}", f"set it to null, or leave {other} out"
            )


def _elsewhere(config: RunConfig) -> dict[str, str]:
    """Parts of this run that read or pass on text alone, with the reason."""
    found = {
        "rollout.session": "turns are text" if config.rollout.session else "",
        "rollout.routing_replay": "engines count a picture's tokens only when they have seen it"
        if config.rollout.routing_replay
        else "",
        "engines.router": "sglang-router drops pictures" if config.engines.router else "",
        "engines.prefill": "the engine that decodes would have to see the pictures too"
        if config.engines.prefill
        else "",
        "algorithm.teacher_server": "the teacher is sent tokens alone"
        if config.algorithm.teacher_server
        else "",
        "pipeline.rollouts_from": "pictures are in the folder of the run that drew them"
        if config.pipeline.rollouts_from
        else "",
    }
    return {field: reason for field, reason in found.items() if reason}


def _untrained(config: RunConfig) -> dict[str, str]:
    """What trains on text alone, with the reason."""
    t, a = config.trainer, config.algorithm
    found = {
        "trainer.kind": "megatron-core's trainer reads text alone: fsdp trains with pictures"
        if t.by_megatron
        else "",
        "trainer.rank": "it gets tokens alone" if t.rank is not None else "",
        "trainer.lora": "adapters beside pictures are not built" if t.lora is not None else "",
        "algorithm.teacher": "a teacher sees no pictures" if a.teacher is not None else "",
        "algorithm.reference": "another model has another tower" if a.reference is not None else "",
    }
    return {field: reason for field, reason in found.items() if reason}
