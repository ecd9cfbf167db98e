"""Every family in every layout, held against plain Hugging Face models and torch AdamW on one process.

The first table has a row for each family and layout: log-probabilities, the gradients of one step and an export, or the reason of
a refusal. The second has steps, with what the other parity tests leave out: a temperature, weight decay alone, and the losses of
routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from examples.plain_rl import adamw, grpo_loss
from millrace.core.config import RunConfig
from millrace.core.config.trainer import Parallel
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.family import Family
from millrace.core.families.registry import BUILT_IN, family_named
from millrace.core.families.tensors import kept_tensors
from millrace.flows.preflight.check_model import ReadModel, check_model
from tests.support.plain_trainer import Plain
from tests.support.tiny_models import SEEING, stack_experts
from tests.support.trainer_ranks import (
    OF_FSDP,
    Workers,
    configuration,
    log_probabilities,
    samples,
    write_batch,
)

LR, STEPS = 1e-2, 2


def _family(kind: str) -> Family:
    return family_named(kind.partition(",")[0])


@dataclass
class Split:
    """A way to cut a model over ranks. model: what it takes of a tiny model; options: of trainer.megatron."""

    ranks: int
    parallel: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


THREE, FOUR, ONE_KEY_HEAD = {"num_hidden_layers": 3}, {"num_hidden_layers": 4}, {"num_key_value_heads": 1}
SPLITS = {
    "tp1": Split(1, {}),
    "tp2": Split(2, {"tensor": 2, "sequence": True}),
    "tp2 of one key head": Split(2, {"tensor": 2, "sequence": True}, model=ONE_KEY_HEAD),
    "tp4 of two key heads": Split(4, {"tensor": 4, "sequence": True}, model={"num_attention_heads": 4}),
    "pp2": Split(2, {"pipeline": 2}),
    "uneven pp2": Split(2, {"pipeline": 2}, {"num_layers_in_first_pipeline_stage": 1}, THREE),
    "pp2 by a layout": Split(2, {"pipeline": 2}, {"pipeline_model_parallel_layout": "Ett|tL"}, THREE),
    "vpp2": Split(2, {"pipeline": 2, "virtual": 2}, model=FOUR),
    "uneven vpp2": Split(
        2,
        {"pipeline": 2, "virtual": 2},
        {"pipeline_model_parallel_layout": "Et|t*2|t|tL"},
        {"num_hidden_layers": 5},
    ),
    "cp2": Split(2, {"context": 2}),
    "pp2 cp2": Split(4, {"pipeline": 2, "context": 2}),
    "tp2 cp2": Split(4, {"tensor": 2, "sequence": True, "context": 2}),
    "tp2 cp2 of one key head": Split(4, {"tensor": 2, "sequence": True, "context": 2}, model=ONE_KEY_HEAD),
    "ep2": Split(2, {"expert": 2}),
    "tp2 ep2": Split(2, {"tensor": 2, "sequence": True, "expert": 2}),
    "pp2 ep2": Split(4, {"pipeline": 2, "expert": 2}),
    "etp2": Split(2, {"expert_tensor": 2}),
    "tp2 etp1": Split(2, {"tensor": 2, "sequence": True, "expert_tensor": 1}),
    "ep2 etp2": Split(4, {"expert": 2, "expert_tensor": 2}),
    "tp2 ep2 etp2": Split(4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
}
KINDS: dict[str, dict[str, Any]] = {
    **{family.name: {} for family in BUILT_IN},
    **{name: {} for name in SEEING},
    "qwen3, tied": {"tie_word_embeddings": True},
}
WITHOUT_EXPERTS = "the model has no experts"
NO_EXPERTS = {
    (kind, split): (f"trainer.parallel.{field}", WITHOUT_EXPERTS)
    for kind in KINDS
    for split, each in SPLITS.items()
    for field in each.parallel
    if field.startswith("expert") and not _family(kind).has("router.weight")
}
KEY_HEADS = {
    (kind, split): ("model.path", "latent attention has as many as query heads")
    for kind in KINDS
    for split, each in SPLITS.items()
    if "num_key_value_heads" in each.model and _family(kind).has("linear_kv_up_proj.weight")
}
BIASES_OF_EXPERTS = {
    ("gpt_oss", split): ("trainer.parallel.expert_tensor", "experts of the model have biases")
    for split, each in SPLITS.items()
    if Parallel(**each.parallel).tensor_of_experts > 1
}
REFUSED: dict[tuple[str, str], tuple[str, str]] = {**NO_EXPERTS, **KEY_HEADS, **BIASES_OF_EXPERTS}
CELLS = [(kind, split) for kind in KINDS for split in SPLITS]
USUAL = [  # others are slow
    ("qwen3", "tp2 of one key head"),
    ("qwen3, tied", "vpp2"),
    ("qwen3_moe", "pp2 by a layout"),
    ("qwen3_moe", "etp2"),
    ("qwen3_5_moe", "ep2"),
    ("deepseek_v3", "tp2 cp2"),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "ep2": {"expert": 2},
    "dp2": {},
}


@dataclass
class Case:
    """A way to train, in words of the configuration."""

    megatron: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    weight_decay: float = 0.0
    advantages: bool = True
    max_pack_tokens: int = 48
    recompute: str = "none"


ANY_MODEL = {
    "temperature 0.6": Case(temperature=0.6),
    "weight decay of 0.5 without a gradient": Case(weight_decay=0.5, advantages=False),
}
EXPERTS = {
    "auxiliary loss": Case({"moe_aux_loss_coeff": 0.1}),
    "auxiliary loss alone": Case({"moe_aux_loss_coeff": 0.1}, advantages=False),
    "auxiliary loss, other packs": Case({"moe_aux_loss_coeff": 0.1}, max_pack_tokens=24),
    "auxiliary loss within samples": Case(
        {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"}
    ),
    "z-loss": Case({"moe_z_loss_coeff": 0.02}),
    "all of it": Case(
        {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.02},
        temperature=0.6,
        weight_decay=0.5,
        recompute="full",
    ),
}
# models of a family that differ from its tiny one
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe, first layer dense": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen2_moe, every second layer": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "windows": ("mistral", {"sliding_window": 3}),
    "sinks, one key head": ("gpt_oss", {"num_key_value_heads": 1}),
    "latents, three heads": ("deepseek_v3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "windows, one key head": ("mistral", {"sliding_window": 3, "num_key_value_heads": 1}),
}
TABLE = [
    *(("qwen3", layout, case) for layout in LAYOUTS if layout != "ep2" for case in ANY_MODEL),
    *(("qwen3_moe", "ep2", case) for case in ANY_MODEL),
    *(("qwen3_moe", layout, case) for layout in LAYOUTS for case in EXPERTS),
    *(("qwen2_moe", layout, "all of it") for layout in LAYOUTS),
    *(
        (family.name, layout, "temperature 0.6")
        for family in BUILT_IN
        for layout in LAYOUTS
        if family.name != "qwen3" and (layout != "ep2" or family.has("router.weight"))
        if (family.name, layout) not in REFUSED
    ),
    *((variant, layout, "all of it") for variant in VARIANTS if "moe" in variant for layout in LAYOUTS),
    *(("windows", layout, "temperature 0.6") for layout in ("tp2", "pp2", "cp2")),
    ("windows, one key head", "cp2", "temperature 0.6"),
    ("latents, three heads", "cp2", "temperature 0.6"),
    ("sinks, one key head", "cp2", "temperature 0.6"),
]
TABLE = list(dict.fromkeys(TABLE))


def gradients(rank: Any, url: str, folder: str) -> None:
    """Export the gradients of a step as if they were the weights."""
    rows = rank._read(url)
    with rank._working("train"):
        rank.learner.forward_backward(rank.learner.rank_batch(1, url, rows), 1)
        with torch.no_grad():
            for parameter in rank.policy.parameters():
                if parameter.requires_grad:
                    parameter.copy_(parameter.main_grad)
    rank.export(folder, 0)


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


@dataclass
class Alone:
    """What Hugging Face's model says of a batch."""

    logprobs: dict[str, list[float]]
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def alone(model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Alone]:
    made: dict[str, Alone] = {}

    def make(kind: str, changes: dict[str, Any]) -> Alone:
        if f"{kind} {changes}" not in made:
            plain = PlainCase(model(_family(kind).name, **changes), Case())
            logprobs = {row["sample_id"]: plain.logprobs(row).tolist() for row in samples(1)}
            torch.stack([plain._loss(row) for row in samples(1)]).mean().backward()
            with torch.no_grad():
                for parameter in plain.model.parameters():
                    if parameter.requires_grad:
                        parameter.copy_(parameter.grad)
            folder = tmp_path_factory.mktemp("gradients")
            plain.model.save_pretrained(folder)
            if kind in SEEING:
                stack_experts(folder)
            made[f"{kind} {changes}"] = Alone(logprobs, stored(folder))
        return made[f"{kind} {changes}"]

    return make


def test_every_field_of_a_layout_has_a_row() -> None:
    assert {name for each in SPLITS.values() for name in each.parallel} == set(
        Parallel.model_fields
    ) - OF_FSDP


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        cell if cell in USUAL or cell in REFUSED else pytest.param(*cell, marks=pytest.mark.slow)
        for cell in CELLS
    ],
)
def test_a_family_in_a_layout_is_that_of_hugging_face_or_is_refused(
    workers: Workers,
    model: Callable[..., Path],
    alone: Callable[..., Alone],
    tmp_path: Path,
    kind: str,
    split: str,
) -> None:
    each, changes = SPLITS[split], {**KINDS[kind], **SPLITS[split].model}
    folder = model(_family(kind).name, **changes)
    config = configuration(
        folder,
        each.ranks,
        parallel=each.parallel,
        megatron=each.options,
        optimizer={"distributed": False},  # every rank has whole gradients
    )
    if (kind, split) in REFUSED:
        field, reason = REFUSED[kind, split]
        problems = [*check_model(RunConfig.model_validate(config), False, ReadModel())]
        assert field in [problem.field for problem in problems if reason in problem.reason]
        return
    url, expected = write_batch(tmp_path / "batch", samples(1)), alone(kind, changes)
    with workers.group(config) as group:
        logprobs = group.run(log_probabilities, url)[0]
        group.call("export", str(tmp_path / "export"), 0)
        group.run(gradients, url, str(tmp_path / "gradients"))
    for name, values in expected.logprobs.items():
        assert logprobs[name] == pytest.approx(values, abs=1e-4), name
    back, grads = stored(tmp_path / "export"), stored(tmp_path / "gradients")
    first = stored(folder)
    kept = kept_tensors(str(folder), architecture(read_hf_config(str(folder))))
    assert {name: tensor.shape for name, tensor in back.items()} == {
        name: tensor.shape for name, tensor in first.items()
    }
    assert all(torch.equal(back[name], tensor) for name, tensor in first.items())
    assert grads.keys() - kept.keys() == expected.gradients.keys() - kept.keys()
    for name, grad in expected.gradients.items():
        assert float((grads[name] - grad).abs().max()) < 1e-4 * max(1e-2, float(grad.abs().max())), name


class PlainCase(Plain):
    """The same training, one sequence at a time."""

    def __init__(self, folder: Path, case: Case) -> None:
        super().__init__(folder)
        self.case = case
        self.optimizer = adamw(list(self.model.parameters()), LR, case.weight_decay)

    def train(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        with routers(self.model) as logits:
            losses = [self._loss(row) for row in rows]
        loss = total = torch.stack(losses).mean()
        figures = {"loss": loss.item()}
        aux, z = (self.case.megatron.get(f"moe_{name}_loss_coeff", 0.0) for name in ("aux", "z"))
        if aux:
            each = self._balance(logits)
            total = total + aux * each.sum()
            figures["moe_aux_loss"] = each.mean().item()
        if z:
            each = torch.stack([torch.cat(layer).logsumexp(-1).square().mean() for layer in logits])
            total = total + z * each.sum()
            figures["moe_z_loss"] = each.mean().item()
        return figures | {"grad_norm": self.step(total)}

    def _loss(self, row: dict[str, Any]) -> Tensor:
        new_R = self.logprobs(row, temperature=self.case.temperature)
        advantage = torch.tensor([row["advantage"]])
        mask = torch.tensor([row["loss_mask"]], dtype=torch.float32)
        return grpo_loss(new_R[None], new_R.detach()[None], advantage, mask)

    def _balance(self, logits: list[list[Tensor]]) -> Tensor:
        """Each layer's load balancing loss by Hugging Face's function, whose choices sum to k instead of 1."""
        k = self.model.config.num_experts_per_tok
        losses = []
        for layer in logits:
            within = "moe_router_load_balancing_type" in self.case.megatron
            parts = layer if within else [torch.cat(layer)]
            each = [load_balancing_loss_func((x,), x.shape[1], k) / k for x in parts]
            losses.append(torch.stack(each).mean())
        return torch.stack(losses)


@contextmanager
def routers(model: Any) -> Iterator[list[list[Tensor]]]:
    """Logits of each layer's router, in a list an item of which is one forward pass's [T, E]."""
    found: list[list[Tensor]] = []
    hooks = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            passes: list[Tensor] = []
            found.append(passes)

            def keep(gate: Any, given: Any, _: Any, passes: list[Tensor] = passes) -> None:
                hidden = given[0].reshape(-1, given[0].shape[-1])
                passes.append(torch.nn.functional.linear(hidden, gate.weight))

            hooks.append(layer.mlp.gate.register_forward_hook(keep))
    yield found
    for hook in hooks:
        hook.remove()


def rows_of(step: int, case: Case) -> list[dict[str, Any]]:
    rows = samples(step)
    for row in rows:
        row["advantage"] *= case.advantages
    return rows


def folder_of(model: Callable[..., Path], kind: str) -> Path:
    family, changes = VARIANTS.get(kind, (kind, {}))
    return model(family, **changes)


Expected = Callable[[str, str], tuple[list[dict[str, float]], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def expected(model: Callable[..., Path]) -> Expected:
    """Figures of each step and the weights after the last, of a kind of model and a case."""
    made: dict[tuple[str, str], Any] = {}

    def train(kind: str, name: str) -> Any:
        if (kind, name) not in made:
            case = {**ANY_MODEL, **EXPERTS}[name]
            plain = PlainCase(folder_of(model, kind), case)
            steps = [plain.train(rows_of(step, case)) for step in range(1, STEPS + 1)]
            plain.model.save_pretrained(folder := folder_of(model, kind).parent / f"after-{kind}-{len(made)}")
            made[kind, name] = (steps, load_file(folder / "model.safetensors"))
        return made[kind, name]

    return train


ALWAYS = {  # each layout and each case once
    *(("qwen3", layout, "temperature 0.6") for layout in LAYOUTS),
    *(("qwen3_moe", layout, "all of it") for layout in LAYOUTS),
    *((kind, "tp2", case) for kind in ("qwen3", "qwen3_moe") for case in (*ANY_MODEL, *EXPERTS)),
    ("qwen2_moe", "tp2", "all of it"),
    ("qwen3_moe, first layer dense", "pp2", "all of it"),
    ("deepseek_v3", "tp2", "temperature 0.6"),
    ("kimi_k2", "pp2", "temperature 0.6"),
    ("glm4_moe_lite", "ep2", "temperature 0.6"),
}


@pytest.mark.parametrize(
    ("kind", "layout", "name"),
    [row if row in ALWAYS else pytest.param(*row, marks=pytest.mark.slow) for row in TABLE],
)
def test_steps_and_weights_are_those_of_plain_hugging_face(
    workers: Workers,
    model: Callable[..., Path],
    expected: Expected,
    tmp_path: Path,
    kind: str,
    layout: str,
    name: str,
) -> None:
    case = {**ANY_MODEL, **EXPERTS}[name]
    config = configuration(
        folder_of(model, kind),
        2,
        parallel=LAYOUTS[layout],
        optimizer={"lr": LR, "weight_decay": case.weight_decay},
        megatron=case.megatron,
        max_pack_tokens=case.max_pack_tokens,
        recompute=case.recompute,
    )
    config["rollout"]["sampling"]["temperature"] = case.temperature
    urls = [write_batch(tmp_path / str(step), rows_of(step, case)) for step in range(1, STEPS + 1)]
    with workers.group(config) as group:
        found = [group.train([step], url)[0] for step, url in enumerate(urls, start=1)]
        group.call("export", str(tmp_path / "export"), STEPS)
    steps, weights = expected(kind, name)
    arch = architecture(read_hf_config(str(folder_of(model, kind))))
    for ours, plain in zip(found, steps, strict=True):
        assert {key: ours[key] for key in plain} == pytest.approx(plain, rel=3e-5, abs=2e-6)
    exported = {
        k: v for path in (tmp_path / "export").glob("*.safetensors") for k, v in load_file(path).items()
    }
    assert sorted(exported) == sorted(weights)
    for (
        key,
        weight,
    ) in exported.items():  # AdamW turns the rounding of a gradient near 0 into a part of its step
        gap = (weight - weights[key]).abs()
        if key.endswith("k_proj.bias"):
            # in dimensions that do not rotate it moves all scores alike, so its gradient is rounding alone
            gap = gap.unflatten(0, (-1, arch.head_dim))[:, : arch.rotary]
        assert float(gap.mean()) < (LR / 1000 if case.advantages or case.megatron else 2e-8), key
        # and its sign, where processors round otherwise: of two numbers at most
        assert int((gap > LR / 10).sum()) <= 2, key
