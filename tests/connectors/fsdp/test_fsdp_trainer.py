"""The steps of FSDP's trainer against plain Hugging Face forward passes, torch AdamW and torch clipping; its weights and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from millrace.connectors.huggingface.tiny_vision import put_inputs_first
from millrace.connectors.trainers.megatron.conversion.sources import TorchDistSource
from millrace.connectors.trainers.megatron.optim.optimizer import make_schedule
from millrace.core.algorithms.learning_rate import learning_rate
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.flows.preflight.check_model import ReadModel, check_model
from tests.connectors.megatron.test_parity import policy_loss
from tests.support.plain_trainer import Plain
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import RankFailedError, Workers, configuration, samples, write_batch

FAMILIES = ["qwen3", "llama", "mistral", "gemma3", "qwen3_moe"]
STEPS = (1, 2, 3)


def fsdp(folder: Path, world: int = 1, **changes: Any) -> dict[str, Any]:
    return configuration(folder, world, kind="fsdp", **changes)


@pytest.mark.parametrize("kind", slow_but(FAMILIES, "qwen3", "gemma3", "qwen3_moe"))
def test_steps_have_the_loss_and_gradient_norm_of_plain_torch(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str
) -> None:
    folder = model(kind)
    with workers.group(fsdp(folder, 2, algorithm={"kl_coef": 0.1})) as group:
        ours = [group.train([step], batch.format(step))[0] for step in STEPS]
    plain = Plain(folder)
    for step, found in zip(STEPS, ours, strict=True):
        loss = policy_loss(plain, samples(step), {}, 0.1)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-6)
        assert found["grad_norm"] == pytest.approx(plain.step(loss), rel=1e-4)
        assert found["ratio_distance"] == 0


def gradients(rank: Any, url: str) -> dict[str, torch.Tensor]:
    """The whole gradients of a step on a batch, by parameter."""
    learner = rank.learner
    with rank._working("score"):
        learner.forward_backward(learner.rank_batch(1, url, rank._read(url)), 1)
        return {
            name.removeprefix("inner."): each.grad.full_tensor()
            for name, each in learner.policy.inner.named_parameters()
        }


@pytest.mark.parametrize("kind", slow_but(FAMILIES, "gemma3"))
def test_each_gradient_is_that_of_the_plain_model(
    workers: Workers, model: Callable[..., Path], batch: str, kind: str
) -> None:
    with workers.group(fsdp(model(kind), 2, recompute="full")) as group:
        ours = group.run(gradients, batch.format(1))
    plain = Plain(model(kind))
    policy_loss(plain, samples(1), {}, 0.0).backward()
    expected = {name: each.grad for name, each in plain.model.named_parameters()}
    assert ours[0].keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert torch.equal(ours[0][name], ours[1][name]), "every rank has the same sum"
        assert (ours[0][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


@pytest.mark.parametrize("kind", slow_but(FAMILIES, "gemma3", "qwen3_moe"))
def test_an_export_has_the_tensors_that_the_folder_had(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    with workers.group(fsdp(model(kind), 2)) as group:
        group.call("export", str(tmp_path / "out"), 0)
    there, here = (load_file(folder / "model.safetensors") for folder in (model(kind), tmp_path / "out"))
    assert there.keys() == here.keys()
    for name, tensor in there.items():
        assert torch.equal(here[name], tensor), name


@pytest.mark.parametrize(("first", "second"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_a_checkpoint_loads_with_another_number_of_ranks(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, first: int, second: int
) -> None:
    changes: dict[str, Any] = {"algorithm": {"kl_coef": 0.1, "reference_update_steps": 2}}
    url = str(tmp_path / "saved")
    with workers.group(fsdp(model(), first, **changes)) as group:
        group.train([1], batch.format(1))
        group.train([2], batch.format(2))
        group.call("save", url)
        expected = group.train([3], batch.format(3))[0]
    with workers.group(fsdp(model(), second, **changes)) as group:
        assert set(group.call("load", url)) == {2}
        found = group.train([3], batch.format(3))[0]
    for name in ("loss", "grad_norm", "kl", "lr"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name


def test_a_checkpoint_of_another_trainer_is_refused(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    for writer, reader in (("megatron", "fsdp"), ("fsdp", "megatron")):
        url = str(tmp_path / writer)
        with workers.group(configuration(model(), kind=writer)) as group:
            group.call("save", url)
        with workers.group(configuration(model(), kind=reader)) as group:
            with pytest.raises(RankFailedError, match=f"^TrainerError.*trainer.kind={writer}"):
                group.call("load", url)
            assert [state["version"] for state in group.call("state")] == [None]
    with pytest.raises(ConfigError, match="trainer.kind=fsdp"):
        TorchDistSource(tmp_path / "fsdp", model())


def growth_of_a_read(rank: Any, folder: Path) -> int:
    """Bytes of memory that a rank has more with a model that it has read and not yet cut."""
    import psutil

    from millrace.connectors.trainers.fsdp.packed_model import read_model

    before = psutil.Process().memory_info().rss
    made = read_model(rank.config, str(folder), torch.device("cpu"))
    grown: int = psutil.Process().memory_info().rss - before
    assert made.vocab
    return grown


@pytest.mark.parametrize("sees", [False, True], ids=["text", "pictures"])
def test_one_rank_alone_has_the_stacks_of_experts_that_transformers_makes_of_a_folder(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, sees: bool
) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 64, "head_dim": 64}
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 320}
    made: Any
    if sees:
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
        vision |= {"out_hidden_size": 512, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
        text = {**sizes, **experts, "tie_word_embeddings": False}
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
        made = transformers.Qwen3VLMoeForConditionalGeneration(config)
    else:
        made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))
    made.save_pretrained(tmp_path)
    if sees:
        put_inputs_first(tmp_path / "model.safetensors")
    size = sum(each.nbytes for each in made.parameters())
    with workers.group(fsdp(model("qwen3_moe"), 2)) as group:  # so that its modules are imported
        reader, other = group.run(growth_of_a_read, tmp_path)
    assert reader > 0.8 * size
    assert other < 0.3 * size


def test_a_model_that_cannot_be_made_is_refused(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with (
        pytest.raises(RankFailedError, match=r"^ConfigError.*model\.path"),
        workers.group(fsdp(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_layers_that_remember_other_samples_of_a_pack_are_refused(
    workers: Workers, model: Callable[..., Path], kind: str
) -> None:
    """transformers' recurrences without kernels read a pack as one text: log-probabilities were off by 0.02 nats."""
    made = fsdp(model(kind))
    found = [*check_model(RunConfig.model_validate(made), False, ReadModel())]
    assert "trainer.kind" in [problem.field for problem in found if "in a pack" in problem.reason]
    with pytest.raises(RankFailedError, match=r"^ConfigError.*other samples in a pack"), workers.group(made):
        pass


def test_a_teacher_and_a_reference_of_other_folders(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    """What megatron-core's trainer makes of the same."""
    other = model("qwen3", initializer_range=0.05)
    url = write_batch(tmp_path, samples(1))
    found = []
    for kind in ("fsdp", "megatron"):
        changes: dict[str, Any] = {
            "algorithm": {
                "kl_coef": 0.1,
                "reference": str(other),
                "teacher": str(other),
                "distillation_coef": 0.5,
            }
        }
        with workers.group(configuration(model(), kind=kind, **changes)) as group:
            found.append(group.train([1], url)[0])
    for name in ("loss", "grad_norm", "kl", "teacher_kl", "entropy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "decay"), [(0, 5), (3, 9), (4, 4)])
def test_rates_are_those_of_megatron(kind: Any, warmup: int, decay: int) -> None:
    class Optimizer:
        param_groups = [{"lr": 0.0, "weight_decay": 0.0}]

    schedule = {"kind": kind, "warmup_steps": warmup, "decay_steps": decay, "min_lr": 1e-4}
    config = RunConfig.model_validate(configuration("model", schedule=schedule))
    theirs = make_schedule(Optimizer(), config, 1e-2, config.trainer.schedule)
    for done in range(12):
        rate = learning_rate(kind, done, peak=1e-2, least=1e-4, warmup=warmup, decay=max(decay, warmup + 1))
        assert rate == pytest.approx(Optimizer.param_groups[0]["lr"], rel=1e-12, abs=0), done
        theirs.step(increment=1)
