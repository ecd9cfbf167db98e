"""The tables of docs/models.md, made from families, presets and tests: `python -m tests.support.models_page` writes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from millrace.core.config.plan.memory import size_text
from millrace.core.config.plan.preset_memory import KINDS, LayoutMemory, layout_memory
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import resolved
from millrace.core.families.presets import PRESETS
from millrace.core.families.registry import BUILT_IN, every_family, family_named
from tests.connectors.megatron import test_layout_parity as parity
from tests.golden.curves import KEPT

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
COMMAND = "python -m tests.support.models_page"
START, END = f"<!-- written by `{COMMAND}` -->", "<!-- end of what it writes -->"


def tables() -> str:
    """What stands between the two marks."""
    return "\n".join([*_families(), "", *_presets()])


def page(text: str) -> str:
    """A page with its tables made again."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} has no {START}, or no {END} behind it"
    return f"{before}{START}\n\n{tables()}\n\n{END}{after}"


def _families() -> Iterator[str]:
    kinds: dict[str, list[str]] = {"of tensors": [], "of pipelines": [], "of experts": []}
    for name, split in parity.SPLITS.items():
        of_experts = any(field.startswith("expert") for field in split.parallel)
        kind = "experts" if of_experts else "pipelines" if "pipeline" in split.parallel else "tensors"
        kinds[f"of {kind}"].append(name)
    yield from (f"- Layouts {kind}: {', '.join(names)}" for kind, names in kinds.items())
    yield ""
    yield "| family | `model_type` | checkpoint's class | refused layouts | presets |"
    yield "|---|---|---|---|---|"
    for family in BUILT_IN:
        assert {(family.name, split) for split in parity.SPLITS} <= set(parity.CELLS), family.name
        assert (KEPT / f"{family.name}.json").exists(), f"{family.name} has no curve"
        names = [
            name
            for name, preset in PRESETS.items()
            if family_named(preset.config["model_type"]).title == family.title
        ]
        presets = ", ".join(f"`{name}`" for name in names) or "none"
        forms = [each for each in every_family() if each.title == family.title]
        types = ", ".join(f"`{form.name}`" for form in forms)
        classes = ", ".join(form.model_class for form in forms)
        yield f"| {family.title} | {types} | {classes} | {_refused(family.name)} | {presets} |"


def _refused(family: str) -> str:
    """The layouts that a family is refused in, by reason."""
    by_reason: dict[str, list[str]] = {}
    for (name, split), (_, reason) in parity.REFUSED.items():
        if name == family and split not in by_reason.setdefault(reason, []):
            by_reason[reason].append(split)
    said = ["those of experts"] if by_reason.pop(parity.WITHOUT_EXPERTS, None) else []
    said += [f"{', '.join(splits)}. Reason: {reason}" for reason, splits in by_reason.items()]
    return "; ".join(said) or "none"


def _presets() -> Iterator[str]:
    least, *larger = KINDS
    kinds = " | ".join([f"GPUs of {least} GB", *(f"only of {name} GB" for name in larger)])
    yield f"| preset | parameters | {kinds} |"
    yield "|---|---|" + "---|" * len(KINDS)
    for name, preset in PRESETS.items():
        count = architecture(resolved(preset.config, preset.model)).parameters
        fit = {kind: [at for at in layout_memory(name) if at.gpu == kind] for kind in KINDS}
        cells = " | ".join("; ".join(map(_layout, fit[kind])) or "–" for kind in KINDS)
        yield f"| `{name}` | {count / 1e9:,.{0 if count > 1e11 else 2}f} B | {cells} |"


def _layout(memory: LayoutMemory) -> str:
    at = memory.layout
    sizes = {"tp": at.tensor, "pp": at.pipeline, "ep": at.expert}
    split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    kept = [] if at.recompute == "none" else [f"{at.recompute} recompute"]
    said = ", ".join([*split, *kept, size_text(memory.trainer)])
    return f"**{at.gpus}**: {said}"


def main() -> None:
    """Write the tables, or with --check say whether they are current."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if text == page(text) else f"{PAGE} is not current: run {COMMAND}")
    PAGE.write_text(page(text), encoding="utf-8")


if __name__ == "__main__":
    main()
