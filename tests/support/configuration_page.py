"""docs/configuration.md, made from the models: `python -m tests.support.configuration_page` writes it.

Owns the page's form; every word about a field stands with the field, and about a choice with its menu.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from millrace.core.config.megatron_options.ddp import DDP
from millrace.core.config.megatron_options.optimizer import OPTIMIZER
from millrace.core.config.megatron_options.transformer import TRANSFORMER
from millrace.core.config.parts.from_preset import THE_PRESETS, is_from_preset
from millrace.core.config.parts.menu import Menu, menu_of, variants
from millrace.core.config.parts.restart import Restart, restart_of
from millrace.core.config.parts.section import NAME, models
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.config.run_config import RunConfig
from millrace.core.contracts.references import WHOLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
COMMAND = "python -m tests.support.configuration_page"
HEAD = f"""# Configuration

<!-- written by `{COMMAND}`; change the models in core/config instead -->

For everyone who writes or changes a run's YAML file: every field, what it means, and what it may be.

A run is one YAML file and `key=value` overrides behind it on the command line:

```
millrace check run.yaml                                   # look at all that it names, print the plan
millrace train run.yaml run.name=b trainer.optimizer.lr=1e-6
millrace train run.yaml data.sources.0.weight=2           # an item of a list by its number
millrace train run.yaml evaluation.sets.held_out.samples_per_prompt=4   # or by its name
```

Unknown keys are errors, and so are fields that contradict each other; all problems are shown at once, each with field,
value and remedy. A field that is set and acts on nothing in the run is no error: the plan has it under `no effect`, with the
reason. Secrets stand in the environment, never here.

**Presets.** Where the default is *the preset's*, `algorithm.preset` may set the field, or `model.preset` outside of `algorithm`,
and else the default beside it holds: [algorithms.md](algorithms.md) has each algorithm's fields, and `millrace models` lists models. There `null` is the preset's too, as in an empty field of a form.
In `overlong` and `constant_length` null is a value: leave them out for the preset's.

**A file can build on another.** `base: grpo.yaml` takes all values of that file, whose path is relative to the file that
names it; what stands beside `base` changes them. Lists are replaced whole.

**Relative paths.** The same under `millrace train`, `check` and a Prefect worker:

| a relative path | means |
|---|---|
| in a YAML file, of what a run reads: `model.path`, `model.tokenizer`, `model.chat_template`, `algorithm.teacher`, `algorithm.reference`, `algorithm.advantage.critic.path`, `trainer.lora.path`, `data.sources[].path`, `evaluation.sets[].path`, `run.import_from` | the folder of that file, of a base the base's |
| the same, in a recipe that ships with millrace | the working directory |
| of what a run writes: `placement.kernel_cache`, `storage.root`, `sync.directory`, `tracking.uri` | the working directory, as `--root` of the other commands |
| behind the file on the command line, in a form, and in a deployment's parameters | the working directory; of a worker that is the folder in which `millrace deploy` was called |
| `package.module:function` | modules are found beside the YAML file and its bases, then in the working directory; an installed package of the same name comes first, which `check` says |

**Changes.** Started again, a run goes on with what the file says now. *may change in* names where a field may then have
another value than before: in the *run* itself, in a *branch* of it (`millrace branch`), or in *neither*. Where it is *its
place*, what the path names may lie elsewhere: hashes in `run.json` say whether it is the same. A changed field
acts from the first step, or the first task of its kind, after the start: moments and step counts of the optimizer stay,
its numbers and the schedule are the file's. It is recorded under `changes` in `run.json`, with the iteration from which it
holds. A change that is not allowed is refused, with the reason. Steps that are made again after a crash use
the settings that they were first made under, which stand in `step.json`.

**Choices.** `engines`, `sync`, `algorithm.loss` and `algorithm.advantage` are choices by `kind`: each kind has only the
fields that act there. A bare word is that kind with its defaults.

```yaml
algorithm:
  loss: gspo                # the same as  loss: {{kind: gspo}}
  advantage: {{kind: gae, lam: 0.95}}
```

On the command line `algorithm.loss.clip_high=0.28` changes one field, and `engines=embedded` takes another kind with its
defaults; `engines.kind=embedded` takes it and keeps the other fields.

"""
FUNCTIONS = """## functions

Your function is named by its import path, with options that it gets as keyword arguments at every call. A bare
import path has no options. [Your functions](algorithms.md#your-functions) says what each function gets and returns.

```yaml
filter:
  group_filter: my_project.filters:not_too_easy
algorithm:
  shaping: {function: my_project.shaping:shorter, options: {factor: 0.1}}
```

| field | type | default | meaning |
|---|---|---|---|
"""
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}", "min_length": "at least {} long"}
PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]{0,62}$": "lower-case name, 63 characters at most",
    NAME: "name",
    WHOLE: "`${env:NAME}` or `${prefect:BLOCK}`",
    r"^https?://": "a URL",
    r"^[A-Za-z0-9_-]*$": "name",
}


def page() -> str:
    """The whole page."""
    fields = RunConfig.model_fields
    index = " · ".join(f"[{name}](#{name})" for name in [*fields, "functions"])
    sections = "\n".join(line for name, field in fields.items() for line in _section(name, field))
    sections = sections.replace("## engines\n", f"{options_tables()}\n## engines\n", 1)
    functions = "\n".join(
        _row("functions", name, field, None) for name, field in UserFunction.model_fields.items()
    )
    return f"{HEAD}{index}\n\n{sections}\n{FUNCTIONS}{functions}\n"


def _section(path: str, field: FieldInfo, above: Restart | None = None) -> Iterator[str]:
    """The section or choice that a field holds, and all below it. above: the restart decision of the section that holds it."""
    yield f"## {path}\n"
    menu, restart = menu_of(field), restart_of(field, above)
    if menu:
        yield from _choice(path, menu, variants(field), restart, is_from_preset(field))
        below = {
            name: item for model in variants(field).values() for name, item in model.model_fields.items()
        }
    else:
        below = {}
        for model in models(field.annotation):
            yield f"{(model.__doc__ or '').strip()}\n"
            yield "| field | type | default | may change in | meaning |\n|---|---|---|---|---|"
            for name, item in model.model_fields.items():
                yield _row(path, name, item, restart)
            yield ""
            below |= model.model_fields
    for name, item in below.items():
        if _has_section(item):
            yield from _section(_place(path, name, item), item, restart)


def options_tables() -> str:
    """Options passed on to megatron-core: a section a class."""
    lines = []
    for table in (TRANSFORMER, OPTIMIZER, DDP):
        lines += [
            f"## {table.place}\n",
            f"Fields of megatron-core's `{table.of}`. Every other is refused with its reason.",
        ]
        lines += ["\n| field | takes | acts with | meaning |\n|---|---|---|---|"]
        for name, option in table.accepted.items():
            needs = ["a mixture of experts"] if option.experts else []
            needs += [option.need.words] if option.need else []
            takes = _kind(get_args(option.type)[0] if get_origin(option.type) is Annotated else option.type)
            lines.append(f"| `{name}` | {takes} | {', '.join(needs)} | It {option.effect}. |")
        lines.append("")
    return "\n".join(lines)


def _choice(
    path: str, menu: Menu, kinds: Mapping[str, type[BaseModel]], restart: Restart | None, from_preset: bool
) -> Iterator[str]:
    yield f"{inspect.cleandoc(menu.text)}\n"
    yield f"The default is {f'{THE_PRESETS}, else ' if from_preset else ''}`{menu.default}`.\n"
    names = dict.fromkeys(name for model in kinds.values() for name in model.model_fields if name != "kind")
    if names:
        yield "| field | of kind | type | default | may change in | meaning |\n|---|---|---|---|---|---|"
    for name in names:
        having = [kind for kind, model in kinds.items() if name in model.model_fields]
        shown = "every" if len(having) == len(kinds) else ", ".join(f"`{kind}`" for kind in having)
        yield _row(path, name, kinds[having[0]].model_fields[name], restart, f" {shown} |")
    yield ""


def _row(path: str, name: str, field: FieldInfo, above: Restart | None, kinds: str = "") -> str:
    meaning = field.description or ""
    menu = menu_of(field)
    if _has_section(field):
        place = _place(path, name, field)
        meaning = f"{meaning or (menu.title if menu else '')} See [{place}](#{_anchor(place)}).".strip()
        kind = "choice" if menu else "list" if place.endswith("[]") else "section"
    else:
        kind = ", ".join([_kind(field.annotation), *_bounds(field)])
    may = "" if path == "functions" else f" {_may_change(field, above)} |"
    return f"| `{name}` |{kinds} {kind} | {_default(field, menu)} |{may} {meaning} |".replace("\n", " ")


def _may_change(field: FieldInfo, above: Restart | None) -> str:
    """The column "may change in" of a field; empty for a section whose fields differ in it."""
    restart = restart_of(field, above)
    if restart is None:
        return ""
    if restart.moves:
        return "its place" if not restart.branch else "branch; its place"
    return "run, branch" if restart.resume else "branch" if restart.branch else "neither"


def _has_section(field: FieldInfo) -> bool:
    """Whether a field's own fields are shown in a section; the fields of functions are shown once."""
    return any(model is not UserFunction for model in models(field.annotation))


def _place(path: str, name: str, field: FieldInfo) -> str:
    return f"{path}.{name}" + ("[]" if get_origin(field.annotation) is list else "")


def _kind(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, UnionType):
        return " or ".join(_kind(part) for part in parts)
    if origin is Annotated:
        return ", ".join([_kind(parts[0]), *(bound for field in parts[1:] for bound in _bounds(field))])
    if origin is list:
        return f"list of {_kind(parts[0])}"
    if origin is tuple:
        return f"{len(parts)} × {_kind(parts[0])}"
    if origin is dict:
        return "mapping"
    names = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true or false",
        NoneType: "null",
        UserFunction: "[function](#functions)",
    }
    return names[annotation]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for item in field.metadata:
        for name, form in BOUNDS.items():
            if getattr(item, name, None) is not None:
                yield form.format(getattr(item, name))
        pattern = getattr(item, "pattern", None)
        if pattern:
            yield PATTERNS.get(str(pattern), "`package.module:function`")


def _default(field: FieldInfo, menu: Menu | None) -> str:
    own = _own_default(field, menu)
    return f"{THE_PRESETS}, else {own}" if is_from_preset(field) else own


def _own_default(field: FieldInfo, menu: Menu | None) -> str:
    if menu:
        return f"`{menu.default}`"
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        changed = field.default.model_dump(exclude_unset=True)
        return ", ".join(f"`{name}: {item}`" for name, item in changed.items())
    if _has_section(field):
        return "none" if not field.default else str(field.default)
    if field.default is None:
        return "null"
    return f"`{_plain(field.default)}`"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _anchor(heading: str) -> str:
    return "".join(c for c in heading.lower() if c.isalnum() or c in "-_")


def main() -> None:
    """Write the page, or with --check say whether it is current."""
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        sys.exit(0 if current else f"{PAGE} is not current: run {COMMAND}")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
