"""A plan as text: a name and a text in each line. Owns the selection, the order and the layout."""

import textwrap
from collections.abc import Iterator, Sequence

from millrace.core.config.plan import MemoryPart, Plan, size_text
from millrace.core.config.plan.offload import HostStep
from millrace.flows.preflight import plan_seen
from millrace.flows.preflight.check import Checked
from millrace.flows.preflight.check_versions import versions_line
from millrace.flows.preflight.plan_learning import asynchrony, learning, without_effect

NARROWEST = 40  # columns of a text, on any terminal


def plan_text(plan: Plan, found: Checked, width: int | None) -> str:
    """The plan. width: columns of the terminal; None does not wrap lines, as for a file or a pipe."""
    lines = list(_lines(plan, found))
    indent = max(len(name) for name, _ in lines) + 2
    title = f"run {plan.run}"
    if plan.parameters:
        title += f": {plan.parameters / 1e6:,.1f} M parameters"
    missing = []
    if not plan.parameters and found.model.unknown is None:
        missing = ["The model is made by run.prepare; its memory is not known yet."]
    return "\n".join([title, *(_laid_out(name, text, indent, width) for name, text in lines), *missing])


def _laid_out(name: str, text: str, indent: int, width: int | None) -> str:
    """A line with its name on the left, and its text beside it."""
    wrapped: list[str] = []
    for line in text.splitlines() or [""]:
        wrapped += textwrap.wrap(line, max(NARROWEST, width - indent)) or [""] if width else [line]
    return f"\n{' ' * indent}".join([f"{name:<{indent}}{wrapped[0]}", *wrapped[1:]])


def _lines(plan: Plan, found: Checked) -> Iterator[tuple[str, str]]:
    yield plan_seen.run_in_storage(found.config, found.run)
    yield from plan_seen.run_folder(found)
    yield from plan_seen.weights(found)
    yield from plan_seen.unverified(found)
    yield from learning(found.config)
    yield from plan_seen.data(found)
    yield from plan_seen.prompt(found)
    yield from plan_seen.answer(found)
    yield from plan_seen.session(found)
    yield from plan_seen.reward(found)
    yield from _numbers(plan)
    yield from asynchrony(found.config)
    yield from _layout(plan)
    yield from plan_seen.keys_that_change_nothing(found)
    yield from plan_seen.comparison(found.config)
    yield from without_effect(found.config, plan.layout)
    sizes = [
        (f"a trainer rank ({'GPU' if plan.layout.device == 'cuda' else 'host'} memory)", plan.trainer_memory),
        ("all ranks (host memory)", plan.host_memory),
        (f"an engine ({'GPU' if plan.layout.gpus_an_engine else 'host'} memory)", plan.engine_memory),
        ("disk", plan.disk),
    ]
    for name, parts in sizes:
        if parts:
            yield name, _parts(parts)
    if plan.host_step:
        yield "AdamW on the host", host_step_text(plan.host_step)
    yield "files", "\n".join(plan.files)
    yield "versions", versions_line(found.config)


def _numbers(plan: Plan) -> list[tuple[str, str]]:
    n = plan.numbers
    lost = "dropped groups" if n.drops else "groups that fail"
    spare = f" (and up to {n.spare_prompts} in place of {lost})" if n.spare_prompts else ""
    chunks = f", its passes in chunks of {n.chunk_groups} finished groups" if n.chunk_groups else ""
    passes = f"{n.passes} passes of " if n.passes > 1 else ""
    a_pass = n.steps // n.passes
    steps = (
        "no step: pipeline.rollouts_only"
        if n.rollouts_only
        else f"{passes}{a_pass} step{'s' if a_pass > 1 else ''} of {n.global_batch}{chunks}"
    )
    stored = f", stored by the run {n.rollouts_from}," if n.rollouts_from else ""
    return [
        (
            "an iteration",
            f"{n.prompts} prompts{spare} × {n.samples_per_prompt} = {n.samples} samples{stored} -> {steps}",
        ),
        (
            "lengths",
            f"prompt {n.prompt_tokens} + response {n.response_tokens} tokens at most; packs of {n.pack_tokens}, "
            f"{n.samples_a_pack} or more samples each",
        ),
        (
            "all iterations",
            f"{n.iterations}, all with the weights at model.path"
            if n.rollouts_only
            else f"{n.iterations} × {n.steps} -> weight versions 1 .. {n.weight_versions}"
            + (f"; engines are sent one every {n.sync_every} iterations" if n.sync_every > 1 else ""),
        ),
        (
            "evaluations",
            f"{n.evaluations}: {n.evaluated_samples} samples a prompt" if n.evaluations else "none",
        ),
        (
            "checkpoints",
            "none: nothing is trained"
            if n.rollouts_only
            else f"{len(n.checkpoints)} saved, kept {_listed(n.checkpoints_kept)}; exported {_listed(n.exports)}",
        ),
    ]


def _layout(plan: Plan) -> list[tuple[str, str]]:
    at = plan.layout
    cut = f"tp {at.tensor} × pp {at.pipeline} × cp {at.context} × dp {at.data}"
    extra = (f", ep {at.expert}" if at.expert > 1 else "") + (", sp" if at.sequence else "")
    extra += f", {at.replicate} copies of the weights" if at.replicate > 1 else ""
    spread = f" on {at.nodes_an_engine} nodes" if at.nodes_an_engine > 1 else ""
    where = f" × {at.gpus_an_engine} GPUs{spread}" if at.gpus_an_engine else " on CPU"
    engines = f"{at.engines} {at.engine_kind.name}" + (where if at.engine_kind.started else "")
    engines += f", the first {at.prefill} to prefill" if at.prefill else ""
    weights = f"by {at.sync}" if at.world_size else "of model.path"
    rollout = [("rollout", at.rollout)] if at.engines else []
    return [
        (
            "trainer",
            f"{at.world_size} rank{'s' if at.world_size > 1 else ''} on {at.device}: {cut}{extra}"
            if at.world_size
            else "none: rollouts only",
        ),
        ("engines", f"{engines}; weights {weights}" if at.engines else "none: nothing is generated"),
        *rollout,
        ("placement", f"{at.placement}" + (f", {at.gpus} GPUs in all" if at.gpus else ", no GPU")),
    ]


def host_step_text(step: HostStep) -> str:
    """How long a step waits for the host, and for what."""
    awaited = "AdamW there" if step.adamw_s >= step.copies_s else "PCIe"
    return (
        f"a step waits about {step.waits_s:.2g} s for {awaited}: AdamW takes {step.adamw_s:.2g} s; meanwhile "
        f"{size_text(step.gradients)} of gradients come from each GPU and {size_text(step.weights)} of weights go back, "
        f"{step.copies_s:.2g} s over PCIe"
    )


def _parts(parts: Sequence[MemoryPart]) -> str:
    total = sum(part.size for part in parts)
    listed = ", ".join(f"{part.name} {size_text(part.size)}" for part in parts)
    return f"{size_text(total)}: {listed}"


def _listed(numbers: Sequence[int], most: int = 6) -> str:
    if not numbers:
        return "none"
    if len(numbers) <= most:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: most - 2]))}, .. {numbers[-1]} ({len(numbers)})"
