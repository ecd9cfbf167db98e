"""What a hook's source reads: names of slime's, attributes of args, tokens of samples."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest

from millrace.core.hooks.slime.names import provide
from millrace.core.hooks.slime.source import HookReads, reads_of

NUMBERS = itertools.count()
TYPES = "slime.utils.types.Sample"
# source of a module with a function f, and names of slime's that f reads
NAMES: dict[str, tuple[str, set[str]]] = {
    "an import": ("from slime.utils.types import Sample\ndef f(args, sample): ...", {TYPES}),
    "under another name": ("from slime.utils.types import Sample as S\ndef f(args, sample): ...", {TYPES}),
    "within the function": ("def f(args, sample):\n    from slime.utils.types import Sample", {TYPES}),
    "within another that it calls": (
        "def g():\n    from slime.utils.types import Sample\ndef f(args, sample): g()",
        {TYPES},
    ),
    "within a class that it makes": (
        "class C:\n    def g(self):\n        from slime.utils.types import Sample\ndef f(args, sample): C().g()",
        {TYPES},
    ),
    "within a function that it does not call": (
        "def g():\n    from slime.utils.types import Sample\ndef f(args, sample): ...",
        set(),
    ),
    "in a try": (
        "try:\n    from slime.no import x\nexcept ImportError:\n    x = 1\ndef f(args, sample): ...",
        {"slime.no.x"},
    ),
    "several": (
        "from slime.utils.misc import SingletonMeta, load_function\ndef f(args, sample): ...",
        {"slime.utils.misc.SingletonMeta", "slime.utils.misc.load_function"},
    ),
    "of a module": (
        "import slime.utils.misc as U\ndef f(args, sample): U.no_such()",
        {"slime.utils.misc", "slime.utils.misc.no_such"},
    ),
    "of the package": (
        "import slime.utils.misc\ndef f(args, sample): slime.utils.misc.no_such()",
        {"slime.utils", "slime.utils.misc", "slime.utils.misc.no_such"},
    ),
    "of a class": (
        "from slime.utils.types import Sample\ndef f(args, sample): Sample.Status.COMPLETED",
        {TYPES},
    ),
    "of a plugin": (
        "def f(args, sample):\n    from slime_plugins.models import glm4",
        {"slime_plugins.models.glm4"},
    ),
    "of others": ("import json, os.path\ndef f(args, sample): json.dumps(os.path)", set()),
}
ARGUMENTS: dict[str, tuple[str, set[str]]] = {
    "read": ("def f(args, sample): return args.a", {"a"}),
    "read in a function that it calls": ("def g(args): args.a\ndef f(args, sample): g(args)", {"a"}),
    "read in another": ("def g(args): args.a\ndef f(args, sample): ...", set()),
    "asked for": ("def f(args, sample): return args.a if hasattr(args, 'a') else 1", set()),
    "asked for with another": (
        "def f(args, sample): return getattr(args, 'a', None) or args.a or args.b",
        {"b"},
    ),
    "set before": ("def f(args, sample):\n    args.a = 1\n    return args.a", set()),
    "set by a name": ("def f(args, sample):\n    setattr(args, 'a', 1)\n    return args.a", set()),
    "set by any name": (
        "def f(args, sample):\n    for key in 'ab':\n        setattr(args, key, 1)\n    return args.a",
        set(),
    ),
    "of another variable": ("def f(args, sample): return sample.a", set()),
    "of an attribute": ("def f(args, sample): return sample.args.a", set()),
    "in a lambda": ("def f(args, sample): return (lambda: args.a)()", {"a"}),
    "of what it holds": ("def f(args, sample): return args.a.b", {"a"}),
}
TOKENS: dict[str, tuple[str, set[str]]] = {
    "of the sample": ("def f(args, sample): return len(sample.tokens)", {"tokens"}),
    "of each": (
        "def f(args, samples): return [s.loss_mask for s in samples] + [s.reward for s in samples]",
        {"loss_mask"},
    ),
    "in a loop": (
        "def f(args, group):\n    for each in group:\n        print(each.rollout_log_probs)",
        {"rollout_log_probs"},
    ),
    "of another": ("def f(args, sample): return args.tokens", set()),
}


def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> HookReads:
    name = f"written_for_slime_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    provide()
    try:
        module = importlib.import_module(name)
        return reads_of(module.f, module)
    finally:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("case", NAMES)
def test_names_of_slimes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    source, expected = NAMES[case]
    assert reads(tmp_path, monkeypatch, source).names.keys() == expected


@pytest.mark.parametrize("case", ARGUMENTS)
def test_attributes_of_args_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    source, expected = ARGUMENTS[case]
    assert reads(tmp_path, monkeypatch, source).arguments.keys() == expected


@pytest.mark.parametrize("case", TOKENS)
def test_tokens_of_samples_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    source, expected = TOKENS[case]
    assert reads(tmp_path, monkeypatch, source).tokens.keys() == expected


def test_modules_beside_the_hook_are_read_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "agents_of_slime"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("def ask(args):\n    from slime.no import x\n    return args.a\n")
    (tmp_path / "apart_of_slime.py").write_text("def other(args): return args.b\n")
    (package / "hook.py").write_text(
        "from apart_of_slime import other\nfrom .helper import ask\ndef f(args, sample): return ask(args), other(args)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("agents_of_slime.hook")
    found = reads_of(module.f, module)
    assert found.names == {"slime.no.x": "helper.py, line 2"}
    assert found.arguments == {"a": "helper.py, line 3"}
