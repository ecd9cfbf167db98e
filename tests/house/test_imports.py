"""The rules about imports, on trees of made-up modules."""

from __future__ import annotations

import pytest

from tests.house.imports import connector_imports, import_cycles
from tests.house.source import SourceFile

CYCLES = {
    "at the top": {
        "core/a.py": "import millrace.core.b",
        "core/b.py": "from millrace.core.a import x",
    },
    "inside a function": {
        "core/a.py": "import millrace.core.b",
        "core/b.py": "def f():\n    from millrace.core import a",
    },
    "by a relative import": {"core/a.py": "from . import b", "core/b.py": "from .a import x"},
    "by import_module": {
        "core/a.py": "import importlib\nimportlib.import_module('millrace.core.b')",
        "core/b.py": "from millrace.core import a",
    },
    "through a package": {
        "core/config/__init__.py": "from millrace.core.config.run import RunConfig",
        "core/config/run.py": "from millrace.core.config import base",
        "core/config/base.py": "from millrace.core.config import RunConfig",
    },
    "over three modules": {
        "core/a.py": "import millrace.core.b",
        "core/b.py": "import millrace.core.c",
        "core/c.py": "import millrace.core.a",
    },
    "with the names users import": {
        "src/millrace/__init__.py": "from millrace.core.a import x",
        "core/a.py": "from millrace import y",
    },
    "in the else of TYPE_CHECKING": {
        "core/a.py": "import millrace.core.b",
        "core/b.py": "if TYPE_CHECKING:\n    pass\nelse:\n    import millrace.core.a",
    },
    "for types": {
        "core/a.py": "import millrace.core.b",
        "core/b.py": "if TYPE_CHECKING:\n    from millrace.core.a import A",
    },
}
NO_CYCLES = {
    "a chain": {"core/a.py": "import millrace.core.b", "core/b.py": "import os"},
    "a diamond": {
        "core/a.py": "import millrace.core.b, millrace.core.c",
        "core/b.py": "import millrace.core.d",
        "core/c.py": "import millrace.core.d",
        "core/d.py": "",
    },
    "a package with its modules": {
        "core/config/__init__.py": "from millrace.core.config.run import RunConfig",
        "core/config/run.py": "from millrace.core.config import base",
        "core/config/base.py": "",
    },
}
OTHER_CONNECTOR = {
    "at the top": "from millrace.connectors.engines.sglang.client import SglangClient",
    "the package": "from millrace.connectors import engines",
    "inside a function": "def f():\n    import millrace.connectors.engines.sglang.client",
    "for types": "if TYPE_CHECKING:\n    from millrace.connectors.engines.sglang.client import SglangClient",
    "relative": "from ...engines.sglang import client",
}
ALLOWED_IMPORT = {
    "its own modules": "from millrace.connectors.trainers import learner",
    "storage": "from millrace.connectors.storage.store import Store",
    "core": "from millrace.core import ledger",
}
CONNECTOR_FILES = {
    f"connectors/{name}.py": ""
    for name in (
        "__init__",
        "engines/__init__",
        "engines/sglang/__init__",
        "engines/sglang/client",
        "storage/__init__",
        "storage/store",
    )
} | {"connectors/trainers/learner.py": "", "core/accounts/ledger.py": ""}


@pytest.mark.parametrize("case", CYCLES)
def test_a_cycle_is_reported_once_with_the_way_around(case: str) -> None:
    (found,) = import_cycles(_files(CYCLES[case]))
    modules = found.problem.removeprefix("import cycle: ").split(" -> ")
    assert modules[0] == modules[-1]
    assert len(modules) >= 3
    assert "neither" in found.remedy


@pytest.mark.parametrize("case", NO_CYCLES)
def test_modules_without_a_cycle_pass(case: str) -> None:
    assert not list(import_cycles(_files(NO_CYCLES[case])))


@pytest.mark.parametrize("case", OTHER_CONNECTOR)
def test_a_connector_that_imports_another_is_reported(case: str) -> None:
    files = _files(CONNECTOR_FILES | {"connectors/trainers/megatron/rank.py": OTHER_CONNECTOR[case]})
    (found,) = connector_imports(files)
    assert found.path == "connectors/trainers/megatron/rank.py"
    assert found.problem.startswith("connectors/trainers imports connectors/engines")


@pytest.mark.parametrize("case", ALLOWED_IMPORT)
def test_a_connector_may_import_its_own_modules_storage_and_core(case: str) -> None:
    files = _files(CONNECTOR_FILES | {"connectors/trainers/megatron/rank.py": ALLOWED_IMPORT[case]})
    assert not list(connector_imports(files))


def test_tasks_may_import_several_connectors() -> None:
    files = _files(CONNECTOR_FILES | {"tasks/x.py": "from millrace.connectors import engines, storage"})
    assert not list(connector_imports(files))


def _files(texts: dict[str, str]) -> list[SourceFile]:
    return [SourceFile(path, text) for path, text in texts.items()]
