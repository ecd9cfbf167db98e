"""A plan as tables for a terminal. Owns what is shown and how it reads."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from millrace.core.config.plan import Part, Plan


def render(plan: Plan) -> RenderableType:
    """The plan, for one screen."""
    title = f"run {plan.run}"
    if plan.parameters:
        title += f": {plan.parameters / 1e6:,.1f} M parameters"
    facts = Table(title=title, show_header=False, title_justify="left", box=None, pad_edge=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, text in [*_numbers(plan), *_layout(plan)]:
        facts.add_row(name, text)
    sizes = [
        (f"a trainer rank ({'GPU' if plan.layout.device == 'cuda' else 'host'} memory)", plan.trainer_memory),
        (f"an engine ({'GPU' if plan.layout.gpus_an_engine else 'host'} memory)", plan.engine_memory),
        ("disk", plan.disk),
    ]
    for name, parts in sizes:
        if parts:
            facts.add_row(name, _parts(parts))
    facts.add_row("files", "\n".join(plan.files))
    missing = "The model is made by run.prepare; its memory is not known yet."
    return Group(facts, *([] if plan.parameters else [missing]))


def _numbers(plan: Plan) -> list[tuple[str, str]]:
    n = plan.numbers
    spare = f" (and up to {n.spare_prompts} to replace dropped ones)" if n.spare_prompts else ""
    steps = f"{n.steps} step{'s' if n.steps > 1 else ''} of {n.global_batch}"
    return [
        (
            "an iteration",
            f"{n.prompts} prompts{spare} × {n.samples_per_prompt} = {n.samples} samples -> {steps}",
        ),
        (
            "lengths",
            f"prompt {n.prompt_tokens} + response {n.response_tokens} tokens at most; packs of {n.pack_tokens}, "
            f"{n.samples_a_pack} or more samples each",
        ),
        ("the run", f"{n.iterations} iterations -> weight versions 1 .. {n.weight_versions}"),
        (
            "evaluations",
            f"{n.evaluations}: {n.evaluated_samples} samples a prompt" if n.evaluations else "none",
        ),
        (
            "checkpoints",
            f"{len(n.checkpoints)} saved, kept {_listed(n.checkpoints_kept)}; exported {_listed(n.exports)}",
        ),
    ]


def _layout(plan: Plan) -> list[tuple[str, str]]:
    at = plan.layout
    cut = f"tp {at.tensor} × pp {at.pipeline} × cp {at.context} × dp {at.data}"
    extra = (f", ep {at.expert}" if at.expert > 1 else "") + (", sp" if at.sequence else "")
    where = f" × {at.gpus_an_engine} GPUs" if at.gpus_an_engine else " on CPU"
    engines = f"{at.engines} {at.engine_kind}" + ("" if at.engine_kind == "external" else where)
    engines += f", the first {at.prefill} to prefill" if at.prefill else ""
    return [
        ("trainer", f"{at.world_size} rank{'s' if at.world_size > 1 else ''} on {at.device}: {cut}{extra}"),
        ("engines", f"{engines}; weights by {at.sync}" if at.engines else "none: supervised"),
        ("placement", f"{at.placement}" + (f", {at.gpus} GPUs in all" if at.gpus else ", no GPU")),
    ]


def _parts(parts: Sequence[Part]) -> str:
    total = sum(part.size for part in parts)
    listed = ", ".join(f"{part.name} {_size(part.size)}" for part in parts)
    return f"{_size(total)}: {listed}"


def _size(size: int) -> str:
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def _listed(numbers: Sequence[int], most: int = 6) -> str:
    if not numbers:
        return "none"
    if len(numbers) <= most:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: most - 2]))}, .. {numbers[-1]} ({len(numbers)})"
