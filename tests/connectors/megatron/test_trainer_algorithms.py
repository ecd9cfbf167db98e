"""Every algorithm in the trainer: what plain Hugging Face models make of it, at any layout, again from a checkpoint."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.connectors.teachers.served_teacher import ServedTeacher
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.algorithm.presets import PRESETS
from millrace.core.config.algorithm.section import TeacherServer
from tests.support.engine_process import embedded_engine
from tests.support.plain_trainer import PlainLearner, scored
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import Group, RankFailedError, Workers, configuration, samples, write_batch

CRITIC = {"lr": 1e-3, "clip": 0.05}
CASES: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS} | {
    "ppo": {"preset": "ppo", "kl_coef": 0.05, "advantage": {"gamma": 0.99, "lam": 0.9, "critic": CRITIC}},
    "ppo, critic first": {
        "preset": "ppo",
        "kl_coef": 0.05,
        "kl_target": 1e-4,
        "kl_horizon": 20,
        "advantage": {"critic": {**CRITIC, "only_steps": 2}},
    },
    "ppo, adaptive KL": {
        "preset": "ppo",
        "kl_coef": 0.05,
        "kl_target": 1e-4,
        "kl_horizon": 20,
        "reference_update_steps": 2,
        "advantage": {"critic": CRITIC},
    },
    "grpo, moving reference": {
        "kl_coef": 0.1,
        "reference_update_steps": 2,
        "kl_target": 1e-3,
        "kl_horizon": 20,
    },
    "grpo, whitened, recomputed": {"whiten": True, "old_logprobs": "recompute"},
    "baseline, KL in the reward": {
        "preset": "reinforce_plus_plus_baseline",
        "kl_placement": "reward",
        "kl_coef": 0.1,
    },
    "grpo with a teacher": {"distillation_coef": 0.5},
    "overlong gae": {"preset": "ppo", "overlong": {"buffer_tokens": 12}, "advantage": {"critic": CRITIC}},
    "gspo, whitened": {"preset": "gspo", "whiten": True},
}
TENSOR = [pytest.param({}, id="one rank"), pytest.param({"parallel": {"tensor": 2}}, id="tensor")]
PIPELINE = [pytest.param({}, id="data"), pytest.param({"parallel": {"pipeline": 2}}, id="pipeline")]
FIGURES = ("loss", "grad_norm", "kl", "value_loss", "critic_grad_norm", "advantage_mean", "return_mean")


@pytest.fixture
def algorithm(model: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    def of(name: str) -> dict[str, Any]:
        values = dict(CASES[name])
        if values.get("distillation_coef") or values.get("preset") == "opd":
            values["teacher"] = str(model("qwen3", hidden_size=48))
        return values

    return of


def urls(folder: Path, config: Algorithm, steps: int = 4) -> list[str]:
    """A batch of each step, as the filter writes it."""
    return [write_batch(folder / str(step), scored(samples(step), config)) for step in range(1, steps + 1)]


def trained(group: Group, batches: list[str], first: int = 1) -> list[dict[str, Any]]:
    return [group.train([step], url)[0] for step, url in enumerate(batches, start=first)]


def figures(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: step[name] for name in FIGURES if name in step} for step in steps]


def assert_steps_of(plain: PlainLearner, iteration: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """Hold the figures of every step of an iteration, in one pass or several, to those of the plain learner."""
    plain.begin(iteration)
    a_pass = max(row["train_step"] for row in iteration)
    for step, found in enumerate(ours, start=1):
        rows = [row for row in iteration if row["train_step"] == 1 + (step - 1) % a_pass]
        for figure, value in plain.learn(rows, step).items():
            assert found[figure] == pytest.approx(value, rel=2e-5, abs=5e-6), f"{figure} of step {step}"


# all presets, and of the other cases those with a part of their own
QUICK = (
    *PRESETS,
    "ppo",
    "ppo, adaptive KL",
    "grpo, moving reference",
    "grpo, whitened, recomputed",
    "grpo with a teacher",
)


@pytest.mark.parametrize("name", slow_but(CASES, *QUICK))
def test_steps_are_those_of_plain_models_and_the_pure_functions(
    workers: Workers,
    model: Callable[..., Path],
    algorithm: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    name: str,
) -> None:
    config = Algorithm.model_validate(algorithm(name))
    batches = urls(tmp_path, config)
    with workers.group(configuration(model(), algorithm=algorithm(name))) as group:
        ours = trained(group, batches)
    plain = PlainLearner(model(), config)
    for step, found in enumerate(ours, start=1):
        rows = scored(samples(step), config)
        plain.begin(rows)
        for figure, value in plain.learn(rows, step).items():
            assert found[figure] == pytest.approx(value, rel=2e-5, abs=5e-6), f"{figure} of step {step}"


def perturbed(folder: Path, target: Path) -> str:
    """The folder's model with other weights."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    torch.manual_seed(5)
    moved = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(moved, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


@pytest.mark.parametrize("updates", [None, 2])
@pytest.mark.parametrize("layout", slow_but(TENSOR, "one rank"))
def test_a_folder_may_be_the_reference_and_the_policy_starts_from_its_own(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, updates: int | None, layout: dict[str, Any]
) -> None:
    values = {"kl_coef": 0.1, "reference": perturbed(model(), tmp_path / "reference")}
    config = Algorithm.model_validate({**values, "reference_update_steps": updates})
    batches = urls(tmp_path, config, 3)
    settings = configuration(model(), 1 + bool(layout), algorithm=config.model_dump(mode="json"), **layout)
    with workers.group(settings) as group:
        ours = trained(group, batches[:2])
        group.call("save", str(tmp_path / "saved"))
        ours += trained(group, batches[2:], 3)
    with workers.group(settings) as group:  # a new trainer has the same reference
        group.call("load", str(tmp_path / "saved"))
        again = trained(group, batches[2:], 3)
    assert figures(again) == figures(ours[2:])
    plain = PlainLearner(model(), config)
    for step, found in enumerate(ours, start=1):
        rows = scored(samples(step), config)
        plain.begin(rows)
        for figure, value in plain.learn(rows, step).items():
            assert found[figure] == pytest.approx(value, rel=2e-5, abs=5e-6), f"{figure} of step {step}"
    assert ours[0]["kl"] > 1e-3


def test_a_reference_of_another_architecture_is_refused_by_name(
    workers: Workers, model: Callable[..., Path]
) -> None:
    algorithm = {"kl_coef": 0.1, "reference": str(model("qwen3", hidden_size=48))}
    with (
        pytest.raises(RankFailedError, match=r"^ConfigError: algorithm.reference = .*architecture"),
        workers.group(configuration(model(), algorithm=algorithm)),
    ):
        pass


def test_a_critic_may_be_another_model_with_a_schedule_that_is_not_the_policys(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    schedule = {"kind": "linear", "warmup_steps": 1, "decay_steps": 3, "min_lr": 1e-4}
    critic = {"path": str(model("qwen2", hidden_size=48)), "lr": 5e-4, "schedule": schedule, "only_steps": 1}
    values = {"preset": "ppo", "kl_coef": 0.0, "advantage": {"critic": critic}}
    config = Algorithm.model_validate(values)
    batches = urls(tmp_path, config, 4)
    with workers.group(configuration(model(), algorithm=values)) as group:
        ours = trained(group, batches[:2])
        group.call("save", str(tmp_path / "saved"))
        ours += trained(group, batches[2:], 3)
        group.call("load", str(tmp_path / "saved"))
        again = trained(group, batches[2:], 3)
    assert figures(again) == figures(ours[2:])
    rates = [0.0, 5e-4, 3e-4, 1e-4]  # half-way down at the second step after the warm-up
    assert [step["critic_lr"] for step in ours] == pytest.approx(rates)
    assert [step["lr"] for step in ours] == pytest.approx([1e-3] * 4)
    plain = PlainLearner(model(), config)
    plain.critic_rates = dict(enumerate(rates, start=1))
    for step, found in enumerate(ours, start=1):
        rows = scored(samples(step), config)
        plain.begin(rows)
        for figure, value in plain.learn(rows, step).items():
            assert found[figure] == pytest.approx(value, rel=2e-5, abs=5e-6), f"{figure} of step {step}"


def test_several_steps_an_iteration_take_values_and_advantages_from_before_it(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    config = Algorithm.model_validate(CASES["ppo"])
    iteration = [row for step in (1, 2, 3) for row in scored(samples(step), config)]
    url = write_batch(tmp_path, iteration)
    with workers.group(configuration(model(), algorithm=CASES["ppo"], global_batch=8)) as group:
        ours = group.train([1, 2, 3], url)
    plain = PlainLearner(model(), config)
    assert_steps_of(plain, iteration, ours)


@pytest.mark.parametrize("layout", slow_but(PIPELINE, "data"))
def test_later_passes_keep_values_and_advantages_from_before_the_first(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, layout: dict[str, Any]
) -> None:
    config = Algorithm.model_validate(CASES["ppo"])
    iteration = [row for step in (1, 2) for row in scored(samples(step), config)]
    url = write_batch(tmp_path, iteration)
    world = 1 + bool(layout)
    settings = configuration(model(), world, algorithm=CASES["ppo"], global_batch=8, passes=2, **layout)
    with workers.group(settings) as group:
        ours = group.train([1, 2, 3, 4], url)
    assert len(ours) == 4
    assert_steps_of(PlainLearner(model(), config), iteration, ours)


@pytest.mark.parametrize(
    "name", slow_but(["grpo, moving reference", "ppo, adaptive KL"], "grpo, moving reference")
)
def test_a_reference_that_moves_between_passes_is_asked_again(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    config = Algorithm.model_validate(CASES[name])
    iteration = [row for step in (1, 2) for row in scored(samples(step), config)]
    url = write_batch(tmp_path, iteration)
    settings = configuration(model(), algorithm=CASES[name], global_batch=8, passes=2)
    with workers.group(settings) as group:
        ours = group.train([1, 2, 3, 4], url)
    assert len(ours) == 4
    assert_steps_of(PlainLearner(model(), config), iteration, ours)


@pytest.mark.parametrize("layout", slow_but(PIPELINE, "data"))
def test_whitening_keeps_what_tells_the_steps_of_an_iteration_apart(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Rewards 0000... in the first step and 1111... in the second gave zeros, when each step was whitened by itself."""
    values = {"preset": "reinforce_plus_plus", "kl_coef": 0.0}
    config = Algorithm.model_validate(values)
    iteration = [row for step in (1, 2) for row in scored(samples(step), config)]
    for row in iteration:
        row["reward"] = row["shaped_reward"] = float(row["train_step"] - 1)
    url = write_batch(tmp_path, iteration)
    with workers.group(configuration(model(), 2, algorithm=values, global_batch=8, **layout)) as group:
        ours = group.train([1, 2], url)
    plain = PlainLearner(model(), config)
    assert_steps_of(plain, iteration, ours)
    tokens = [sum(sum(row["loss_mask"]) for row in iteration if row["train_step"] == step) for step in (1, 2)]
    first, second = (step["advantage_mean"] for step in ours)
    assert first < -0.5
    assert second > 0.5
    assert first * tokens[0] + second * tokens[1] == pytest.approx(0, abs=1e-4)


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "context": {"parallel": {"context": 2}},
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo, adaptive KL", "gspo, whitened", "opd"])
def test_every_layout_makes_the_steps_of_one_rank_and_goes_on_from_its_checkpoint(
    workers: Workers,
    model: Callable[..., Path],
    algorithm: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    name: str,
) -> None:
    values = algorithm(name)
    batches = urls(tmp_path, Algorithm.model_validate(values))
    with workers.group(configuration(model(), algorithm=values)) as group:
        alone = trained(group, batches[:2])
        group.call("save", str(tmp_path / "saved"))
        alone += trained(group, batches[2:], 3)
    for layout, changes in LAYOUTS.items():
        with workers.group(configuration(model(), 2, algorithm=values, **changes)) as group:
            found = trained(group, batches)
            assert group.call("load", str(tmp_path / "saved")) == [2, 2]
            resumed = trained(group, batches[2:], 3)
        for mine, one in zip(figures(found + resumed), figures(alone + alone[2:]), strict=True):
            assert mine == pytest.approx(one, rel=2e-5, abs=1e-5), layout


def state(rank: Any) -> list[Any]:
    """Everything that an algorithm carries from step to step: weights and moments as bytes, and numbers."""
    learner = rank.learner
    found: list[Any] = [learner.kl_controller.value]
    for trained in [learner.policy] + ([learner.critic.trainable] if learner.critic else []):
        found += [p.detach().numpy().tobytes() for p in trained.inner.parameters()]
        for part in trained.optimizer.chained_optimizers:
            parameters = [p for group in part.optimizer.param_groups for p in group["params"]]
            moments = [part.optimizer.state[parameter] for parameter in parameters]
            found += [held[name].numpy().tobytes() for held in moments for name in sorted(held)]
        found.append((trained.schedule.num_steps, trained.optimizer.param_groups[0]["lr"]))
    if learner.reference is not None:
        found += [value.numpy().tobytes() for value in learner.reference.weights.values()]
        found.append(learner.reference.version)
    return found


@pytest.mark.parametrize(
    "name", slow_but(["ppo, adaptive KL", "grpo, moving reference", "ppo, critic first"], "ppo, adaptive KL")
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="sharded"),
        pytest.param({"distributed": False}, id="replicated", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_and_replay_bring_the_algorithms_state_back_bit_for_bit(
    workers: Workers, model: Callable[..., Path], tmp_path: Path, name: str, layout: dict[str, Any]
) -> None:
    batches = urls(tmp_path, Algorithm.model_validate(CASES[name]))
    settings = configuration(model(), 2, algorithm=CASES[name], optimizer=layout)
    with workers.group(settings) as group:
        first = trained(group, batches[:3])
        group.call("save", str(tmp_path / "saved"))
        first += trained(group, batches[3:], 4)
        whole = group.run(state)
    with workers.group(settings) as group:
        group.call("load", str(tmp_path / "saved"))
        again = trained(group, batches[3:], 4)
        replayed = group.run(state)
    with workers.group(settings) as group:
        from_the_start = trained(group, batches)
        remade = group.run(state)
    assert figures(again) == figures(first[3:])
    assert figures(from_the_start) == figures(first)
    for other in (replayed, remade):
        for mine, theirs in zip(other, whole, strict=True):
            assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * len(theirs)


def test_a_checkpoint_without_a_critic_is_refused_where_one_is_needed(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    with workers.group(configuration(model())) as group:
        group.call("save", str(tmp_path / "saved"))
    with (
        workers.group(configuration(model(), algorithm=CASES["ppo"])) as group,
        pytest.raises(RankFailedError, match=r"TrainerError.*saved without a critic"),
    ):
        group.call("load", str(tmp_path / "saved"))


def move_weights_after_the_old_logprobs(rank: Any) -> None:
    """As if the batch's old log-probabilities were those of other weights."""
    compute = rank.learner._start_iteration

    def begin(*args: Any) -> Any:
        shares = compute(*args)
        with torch.no_grad():
            for parameter in rank.policy.parameters():
                parameter.mul_(1.01)
        return shares

    rank.learner._start_iteration = begin


@pytest.mark.parametrize("checked", [True, False])
def test_a_first_step_off_policy_is_refused_unless_the_guard_is_off(
    workers: Workers, model: Callable[..., Path], batch: str, checked: bool
) -> None:
    algorithm = {"old_logprobs": "recompute", "on_policy_guard": checked}
    with workers.group(configuration(model(), algorithm=algorithm)) as group:
        group.run(move_weights_after_the_old_logprobs)
        if checked:
            with pytest.raises(RankFailedError, match=r"RefusedStepError: step 1.*ratio must be exactly 1"):
                group.step(1, batch.format(1))
            assert group.call("state")[0]["version"] == 0
        else:
            assert group.train([1], batch.format(1))[0]["ratio_distance"] > 0


def other_reference(rank: Any) -> None:
    for value in rank.learner.reference.weights.values():
        value.mul_(1.01)


def test_a_first_step_with_another_reference_than_the_weights_is_refused(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    with workers.group(configuration(model(), algorithm={"kl_coef": 0.1})) as group:
        group.run(other_reference)
        with pytest.raises(RankFailedError, match=r"RefusedStepError: step 1.*first_kl must be below 1e-09"):
            group.step(1, batch.format(1))


def test_samples_without_advantages_are_refused_where_the_estimator_needs_them(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    rows = samples(1)
    for row in rows:
        row["advantage"] = None
    none = write_batch(tmp_path / "none", rows)
    rows[0]["advantage"] = 1.0
    some = write_batch(tmp_path / "some", rows)
    with workers.group(configuration(model())) as group:
        with pytest.raises(
            RankFailedError, match=r"TrainerError.*8 of the step's 8 samples have no advantage"
        ):
            group.step(1, none)
        with pytest.raises(
            RankFailedError, match=r"TrainerError.*7 of the step's 8 samples have no advantage"
        ):
            group.step(1, some)
    with workers.group(configuration(model(), algorithm={"loss": "sft"})) as group:
        assert group.train([1], none)[0]["version"] == 1


@pytest.mark.parametrize(
    ("algorithm", "layout"),
    slow_but(
        [
            pytest.param({"preset": "opd"}, {}, id="opd"),
            pytest.param({"preset": "opd"}, {"parallel": {"tensor": 2}}, id="opd-tensor"),
            pytest.param({"distillation_coef": 0.5}, {}, id="grpo"),
            pytest.param({"distillation_coef": 0.5}, {"parallel": {"tensor": 2}}, id="grpo-tensor"),
        ],
        "opd",
    ),
)
def test_a_served_teacher_teaches_what_the_same_weights_in_the_ranks_teach(
    workers: Workers,
    model: Callable[..., Path],
    tmp_path: Path,
    layout: dict[str, Any],
    algorithm: dict[str, Any],
) -> None:
    folder = model("qwen3", hidden_size=48)
    rows = samples(1)
    with embedded_engine(folder, "--dtype", "float32", log=tmp_path / "engine.log") as (url, _):
        server = {"url": url}
        teacher = ServedTeacher(TeacherServer.model_validate(server))

        async def ask() -> list[list[float]]:
            asked = [await teacher.logprobs(row["tokens"], row["response_length"]) for row in rows]
            return [answer.logprobs for answer in asked]

        answers = asyncio.run(ask())
    answered = [{**row, "teacher_logprobs": found} for row, found in zip(rows, answers, strict=True)]
    world = 2 if layout else 1
    steps = []
    for name, teaching, batch in (
        ("held", {"teacher": str(folder)}, rows),
        ("served", {"teacher_server": server}, answered),
    ):
        config = configuration(model(), world, algorithm={**algorithm, **teaching}, **layout)
        with workers.group(config) as group:
            steps.append(group.train([1], write_batch(tmp_path / name, batch))[0])
    held, served = steps
    for figure in ("loss", "grad_norm", "advantage_mean", "teacher_kl"):
        assert served[figure] == pytest.approx(held[figure], abs=1e-4), figure
    assert held["teacher_kl"] != 0


def test_a_batch_without_the_served_teachers_answers_is_refused(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    served = {"preset": "opd", "teacher_server": {"url": "http://nowhere"}}
    with (
        workers.group(configuration(model(), algorithm=served)) as group,
        pytest.raises(
            RankFailedError, match=r"^TrainerError.*algorithm.teacher_server.*no log-probabilities"
        ),
    ):
        group.train([1], write_batch(tmp_path, samples(1)))


def test_a_teacher_of_a_smaller_vocabulary_is_refused(
    workers: Workers, model: Callable[..., Path], tmp_path: Path
) -> None:
    teacher, rows = str(model("qwen3", vocab_size=50)), samples(1)
    for row in rows:
        row["tokens"] = [token % 50 for token in row["tokens"]]
    rows[0]["tokens"][0] = 60  # one rank has it, and both refuse it: the other would wait for the first
    url = write_batch(tmp_path, rows)
    with (
        workers.group(configuration(model(), 2, algorithm={"preset": "opd", "teacher": teacher})) as group,
        pytest.raises(RankFailedError, match=r"^TrainerError.*algorithm.teacher.*vocabulary 50"),
    ):
        group.step(1, url)


@pytest.mark.parametrize(
    ("kind", "shape", "layout"),
    [
        # megatron drops the padding after the tied embedding's bucket, and reads the later stages' state off its places
        pytest.param(
            "qwen3",
            {"tie_word_embeddings": True},
            {"parallel": {"pipeline": 2}},
            id="tied over stages",
            marks=pytest.mark.slow,
        ),
        # experts have an optimizer of their own, whose state is one of a list
        pytest.param(
            "qwen3_moe",
            {},
            {"optimizer": {"distributed": False}},
            id="experts, replicated optimizer",
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3_moe", {}, {"parallel": {"expert": 2}}, id="experts apart"),
        pytest.param("qwen3", {}, {"dtype": "bfloat16"}, id="bfloat16"),
    ],
)
def test_ppo_goes_on_from_its_checkpoint_bit_equal(
    workers: Workers,
    model: Callable[..., Path],
    tmp_path: Path,
    kind: str,
    shape: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    values = CASES["ppo, adaptive KL"]
    batches = urls(tmp_path, Algorithm.model_validate(values))
    with workers.group(configuration(model(kind, **shape), 2, algorithm=values, **layout)) as group:
        trained(group, batches[:2])
        group.call("save", str(tmp_path / "saved"))
        first = trained(group, batches[2:], 3)
        group.call("load", str(tmp_path / "saved"))
        assert figures(trained(group, batches[2:], 3)) == figures(first)
