"""millrace assigns into objects of PyTorch and megatron-core in connectors/trainers/patches.py alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

import millrace
from millrace.connectors.trainers.megatron.model.policy_model import made_by, submodules_of

PATCHES = "connectors/trainers/patches.py"
FOLDERS = ("core", "connectors", "tasks", "flows")
UPSTREAM = ("torch", "megatron")
# attributes of megatron's and PyTorch's objects that patches.py sets on instances, which have no name to tell them by
PATCHED_ATTRIBUTES = {
    "_copy_main_params_to_model_params",
    "_copy_model_grads_to_main_grads",
    "get_main_grads_for_grad_norm",
    "_set_main_param_and_optimizer_states",
    "cuda_dtoh_stream",
    "sharded_param_state_fully_reshardable",
    "grad_scale",
}


def assignments_into_upstream(source: str) -> list[str]:
    """Assignments of a module into objects of upstream, as source text.

    An object is of upstream if its name was imported from there, or assigned from such a name, or if the attribute is one
    of PATCHED_ATTRIBUTES.
    """
    tree = ast.parse(source)
    names = set(_imported(tree))
    for node in ast.walk(tree):  # an alias: module: Any = layers
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name | ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if _root(node.value) in names:
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return [
        ast.unparse(target)
        for target in _targets(tree)
        if _root(target) in names or (isinstance(target, ast.Attribute) and target.attr in PATCHED_ATTRIBUTES)
    ]


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in UPSTREAM:
                    yield alias.asname or alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            yield from (alias.asname or alias.name for alias in node.names)


def _targets(tree: ast.Module) -> Iterator[ast.expr]:
    """Attributes and items that are set or deleted: by assignment, by setattr and delattr, and through vars()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            target, name = node.args[:2]
            attribute = name.value if isinstance(name, ast.Constant) else ast.unparse(name)
            yield ast.Attribute(target, str(attribute), ast.Store())


def _root(node: ast.expr) -> str | None:
    """The name that an expression begins with; of vars(x) it is x's."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars":
            node = node.args[0]
        else:
            return None
    return node.id


def modules() -> list[str]:
    root = Path(millrace.__file__).parent
    return sorted(str(path.relative_to(root)) for folder in FOLDERS for path in (root / folder).rglob("*.py"))


def test_no_module_but_patches_assigns_into_pytorch_or_megatron() -> None:
    root = Path(millrace.__file__).parent
    assignments = {name: assignments_into_upstream((root / name).read_text()) for name in modules()}
    assert len(assignments.pop(PATCHES)) > 5
    assert {name: targets for name, targets in assignments.items() if targets} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize = None",
        "import torch\ntorch.utils.deterministic.fill_uninitialized_memory = False",
        "import torch.distributed as dist\ndist.x += 1",
        "from megatron.core.tensor_parallel import layers\nmodule: Any = layers\nmodule._available = True",
        "from megatron.core.transformer.moe import moe_utils\nvars(moe_utils)['x'] = None",
        "from megatron.core.transformer.moe import moe_utils\nsetattr(moe_utils, name, None)",
        "from megatron.core.transformer import moe\nmoe.TABLE['x'] = None",
        "import torch\ndel torch.cuda.x",
        "def f(part):\n    part._copy_main_params_to_model_params = copy",
        "def f(part):\n    setattr(part, 'sharded_param_state_fully_reshardable', gather)",
    ],
)
def test_an_assignment_into_upstream_is_seen(source: str) -> None:
    assert len(assignments_into_upstream(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.zeros(3)\nx[0] = 1",
        "import torch\nclass A(torch.nn.Module):\n    def f(self):\n        self.scale = 1",
        "from megatron.core.models.gpt import GPTModel\nmodel = GPTModel()\nmodel.config.no_sync_func = f",
    ],
)
def test_an_assignment_into_an_object_of_millraces_own_is_not(source: str) -> None:
    assert assignments_into_upstream(source) == []


@pytest.mark.parametrize(
    ("upstream", "name"),
    [
        (megatron_random, "_get_cuda_rng_state"),
        (megatron_random, "_set_cuda_rng_state"),
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"),
        (moe_utils, "HAVE_TE"),
        (layers, "_grad_accum_fusion_available"),
        (DistributedOptimizer, "_copy_main_params_to_model_params"),
        (DistributedOptimizer, "_copy_model_grads_to_main_grads"),
        (DistributedOptimizer, "get_main_grads_for_grad_norm"),
        (DistributedOptimizer, "sharded_param_state_fully_reshardable"),
        (DistributedOptimizer, "_set_main_param_and_optimizer_states"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_replaced_is_in_the_installed_megatron_core(upstream: object, name: str) -> None:
    assert hasattr(upstream, name)


def test_the_submodules_of_a_layers_part_are_found_in_each_form_that_megatron_core_gives_it() -> None:
    parts = object()
    assert submodules_of(ModuleSpec(module=object, submodules=parts)) is parts
    assert submodules_of(partial(dict, submodules=parts)) is parts
    with pytest.raises(AttributeError):
        submodules_of(dict)


def test_a_layers_part_is_made_by_another_class_in_each_form_that_megatron_core_gives_it() -> None:
    made = build_module(made_by(ModuleSpec(module=list, params={"a": 1}, submodules="b"), dict), c=2)
    assert made == {"a": 1, "submodules": "b", "c": 2}
    assert made_by(partial(list, submodules="b"), dict)(c=2) == {"submodules": "b", "c": 2}
