"""How many layers each stage of a pipeline holds, as options of trainer.megatron divide them."""

import re
from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
OPTIONS = (FIRST, LAST, EMBEDDING, LOSS, LAYOUT)
FORM = re.compile(r"Et+(\|t+)*L")  # E: the embedding, t: a layer, L: the output layer
REPEATED = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"([^*()])\*(\d+)"))  # what, and how often


def layers_of_ranks(config: RunConfig, layers: int) -> list[list[int]]:
    """Numbers of the layers that each rank of a pipeline holds, in all of its stages, if the division comes out even."""
    ranks, first = config.trainer.parallel.pipeline, 0
    held: list[list[int]] = [[] for _ in range(ranks)]
    for stage, count in enumerate(_layers_of_stages(config, layers)):
        held[stage % ranks] += range(first, first + count)
        first += count
    return held


def _layers_of_stages(config: RunConfig, layers: int) -> list[int]:
    """Layers of each stage, in the model's order. Their sum is `layers` if the division comes out even."""
    options, p = config.trainer.megatron, config.trainer.parallel
    if options.get(LAYOUT):
        return [stage.count("t") for stage in _written_out(options[LAYOUT]).split("|")]
    counts = [count // p.virtual for count in _shares(config, layers)] * p.virtual
    counts[0] -= bool(options.get(EMBEDDING))
    counts[-1] -= bool(options.get(LOSS))
    return counts


def _shares(config: RunConfig, layers: int) -> list[int]:
    """What each rank holds: layers, and embedding and output layer where these count as one."""
    options, ranks = config.trainer.megatron, config.trainer.parallel.pipeline
    ends = {0: options.get(FIRST), ranks - 1: options.get(LAST)}
    fixed = {rank: count for rank, count in ends.items() if isinstance(count, int)}
    whole = layers - sum(fixed.values()) + bool(options.get(EMBEDDING)) + bool(options.get(LOSS))
    share = whole // max(1, ranks - len(fixed))
    return [fixed.get(rank, share) for rank in range(ranks)]


def problems(config: RunConfig, layers: int, whose: str) -> Iterator[Problem]:
    """Problems of a division of a model's layers over stages: layers left out, or a stage without layers."""
    options, p = config.trainer.megatron, config.trainer.parallel
    named = [name for name in (LAYOUT, FIRST, LAST, EMBEDDING, LOSS) if options.get(name)]
    if not named and layers % p.pipeline:
        yield Problem(
            "trainer.parallel.pipeline",
            p.pipeline,
            f"does not divide the {whose}'s {layers} layers",
            f"use a divisor of {layers}, or set trainer.megatron.{FIRST}",
        )
        return
    if named == [LAYOUT]:
        written = list(_layout_problems(options[LAYOUT], p.pipeline * p.virtual))
        yield from written
        if written:
            return
    where, value = f"trainer.megatron.{named[0]}" if named else "", options[named[0]] if named else None
    if len(named) > 1 and (LAYOUT in named or ({FIRST, LAST} & {*named} and {EMBEDDING, LOSS} & {*named})):
        yield Problem(where, value, f"it excludes {' and '.join(named[1:])}", "set one of them")
        return
    shares = _shares(config, layers)
    if named != [LAYOUT] and any(share % p.virtual for share in shares):
        yield Problem(
            "trainer.parallel.virtual",
            p.virtual,
            f"does not divide {', '.join(map(str, shares))}, the shares of the {whose}'s {layers} layers that ranks have",
            f"lower it, or write every stage's layers in trainer.megatron.{LAYOUT}",
        )
        return
    counts = _layers_of_stages(config, layers)
    if named and (sum(counts) != layers or min(counts) < 1):
        yield Problem(
            where,
            value,
            f"stages of {', '.join(map(str, counts))} layers are not the {whose}'s {layers}",
            f"have {len(counts)} stages with {layers} layers in all",
        )


def _layout_problems(value: str, stages: int) -> Iterator[Problem]:
    where, written = f"trainer.megatron.{LAYOUT}", _written_out(value)
    if not FORM.fullmatch(written):
        yield Problem(
            where,
            value,
            "it does not have the embedding E, a layer t or more in each stage, and the output layer L",
            "write it as in Et*3|t*4|t*4|tL",
        )
    elif (count := written.count("|") + 1) != stages:
        yield Problem(
            where,
            value,
            f"it has {count} stages, and trainer.parallel.pipeline × virtual = {stages}",
            f"write {stages} stages, or change trainer.parallel.virtual",
        )


def _written_out(layout: str) -> str:
    """A layout without repetitions, or what is no layout unchanged. A number above 999 is none."""
    text = layout.replace(",", "").replace(" ", "")
    if re.search(r"\d{4}", text):
        return text
    for repeated in REPEATED:
        text = repeated.sub(lambda found: found[1] * int(found[2]), text)
    return text
