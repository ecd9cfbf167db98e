"""The rules of small sections, and all rules together."""

from collections.abc import Iterator
from math import lcm
from urllib.parse import urlsplit

from millrace.core.config import eager_rules as eager
from millrace.core.config import engines_rules as engines
from millrace.core.config import lora_rules
from millrace.core.config import pipeline_rules as pipeline
from millrace.core.config import secret_rules as secrets
from millrace.core.config import trainer_rules as trainer
from millrace.core.config.algorithm import rules as algorithm
from millrace.core.config.data import image_rules
from millrace.core.config.data import rules as data
from millrace.core.config.data.rules import file_problems, loss_problems, same_names, template_problems
from millrace.core.config.parts.problems import Problem, nearest
from millrace.core.config.rollout import rules as rollout
from millrace.core.config.run_config import RunConfig
from millrace.core.config.trainer import Parallel
from millrace.core.contracts.task_records import EvaluatedSet
from millrace.core.evaluation import LOWEST_IS_BEST, powers
from millrace.core.families.presets import PRESETS
from millrace.core.sharding import INSTEAD, in_shards, not_in_shards


def model_problems(config: RunConfig) -> Iterator[Problem]:
    """A preset that is not known, or has no layout for the trainer's GPUs."""
    name, t = config.model.preset, config.trainer
    if name is None:
        return
    if name not in PRESETS:
        yield config.problem("model.preset", "`millrace models` lists no such preset", nearest(name, PRESETS))
    elif PRESETS[name].layout(t.world_size) is None and t.device != "cpu" and t.parallel == Parallel():
        counts = " and ".join(str(layout.gpus) for layout in PRESETS[name].layouts)
        yield config.problem(
            "trainer.world_size",
            f"model.preset={name} has layouts for {counts} GPUs and their multiples",
            "set it to one of these, or set trainer.parallel",
        )


def memory_only(field: str, place: str | None) -> Iterator[Problem]:
    """A memory:// path, which other processes cannot see."""
    if place and place.startswith("memory://"):
        yield Problem(
            field,
            place,
            "trainer and engines do not see the memory of another process",
            "give a folder, s3:// or gs://",
        )


def sync_problems(config: RunConfig) -> Iterator[Problem]:
    """Transports that trainer and engines do not share."""
    colocate, e = config.placement.colocate, config.engines
    yield from memory_only("sync.directory", config.sync.directory)
    yield from memory_only("placement.kernel_cache", config.placement.kernel_cache)
    yield from lora_rules.by_name_problems(config)
    if config.sync.kind == "ipc" and not colocate:
        yield config.problem(
            "sync.kind",
            "GPU memory is shared within one GPU only",
            "set it to broadcast or disk, or set placement.colocate=true",
        )
    yield from _compared(config)
    if config.sync.kind != "broadcast":
        return
    if colocate:
        yield config.problem(
            "sync.kind",
            "placement.colocate shares GPUs, and NCCL joins none to a group twice",
            "set it to ipc or disk",
        )
    on_cpu = all(kind.runs_on == "cpu" for kind in e.kinds)
    if e.started and on_cpu != (config.trainer.device == "cpu"):
        yield config.problem(
            "sync.kind",
            f"trainer.device={config.trainer.device} and engines.kind={e.kind} may have no transport in common",
            "set trainer.device=cuda and engines.kind=sglang, or trainer.device=cpu and engines.kind=embedded, or disk",
        )


def _compared(config: RunConfig) -> Iterator[Problem]:
    """A comparison of engines and trainer that is meaningless: engines score prompts at temperature 1 only."""
    temperature = config.rollout.sampling.temperature
    if config.sync.max_prompt_gap is None:
        return
    if temperature != 1:
        yield config.problem(
            "sync.max_prompt_gap",
            f"engines score prompts at temperature 1, and the trainer at rollout.sampling.temperature = {temperature:g}",
            "set it to null, or rollout.sampling.temperature=1",
        )
    if config.engines.prefill:
        yield config.problem(
            "sync.max_prompt_gap",
            "engines that only prefill, or only decode, answer no request alone",
            "set it to null, or leave engines.prefill out",
        )


def placement_problems(config: RunConfig) -> Iterator[Problem]:
    """Trainer and engines that cannot share GPUs, and runs that cannot be split into shards."""
    e = config.engines
    if config.placement.task_runner == "ray":
        for field, reason in not_in_shards(config).items():
            yield config.problem(
                "placement.task_runner",
                f"shards cannot do {field} yet: {reason}",
                f"set it to auto or local, or {INSTEAD.get(field, f'leave {field} out')}",
            )
    elif config.rollout.shards is not None and not in_shards(config):
        yield config.problem(
            "rollout.shards",
            f"with placement.task_runner={config.placement.task_runner} the driver generates here",
            "leave it out, or set placement.task_runner=ray",
        )
    if not config.placement.colocate:
        return
    if not e.started:
        yield config.problem(
            "placement.colocate", "external engines share no GPU with the trainer", "set it to false"
        )
    shared = any("ipc" in kind.transports for kind in e.kinds)
    if not shared or config.trainer.device == "cpu":
        yield config.problem(
            "placement.colocate",
            "with engines.kind=embedded or trainer.device=cpu no GPUs are shared",
            "set it to false",
        )
    elif config.trainer.world_size != e.count * e.gpus:
        yield config.problem(
            "trainer.world_size",
            f"the trainer shares GPUs with engines.count × engines.gpus = {e.count} × {e.gpus}",
            "make both the number of GPUs, or set placement.colocate=false",
        )


def evaluation_problems(config: RunConfig) -> Iterator[Problem]:
    """Held-out sets that cannot be read, distinguished, or learned from."""
    yield from same_names("evaluation.sets", config.evaluation.sets)
    if config.evaluation.background and config.algorithm.supervised:
        yield config.problem(
            "evaluation.background",
            "with algorithm.loss=sft held-out losses are computed by the trainer itself",
            "leave it out",
        )
    for held_out in config.evaluation.sets:
        yield from file_problems(f"evaluation.sets.{held_out.name}.path", held_out.path)
        yield from template_problems(f"evaluation.sets.{held_out.name}", held_out)
        yield from loss_problems(f"evaluation.sets.{held_out.name}", held_out, config.algorithm.supervised)
        if held_out.sampling.temperature == 0 and held_out.samples_per_prompt > 1:
            yield Problem(
                f"evaluation.sets.{held_out.name}.samples_per_prompt",
                held_out.samples_per_prompt,
                "greedy samples of one prompt are identical",
                "set it to 1, or the set's sampling.temperature above 0",
            )


FIGURES = tuple(name for name in EvaluatedSet.__annotations__ if name not in ("file", "pass_at", "subsets"))


def checkpoint_problems(config: RunConfig) -> Iterator[Problem]:
    """Checkpoints that would never be kept."""
    yield from _keep_best(config)
    c = config.checkpoint
    if c.keep_every and c.keep_every < config.run.iterations < lcm(c.every, c.keep_every):
        yield config.problem(
            "checkpoint.keep_every",
            f"no checkpoint of the run's {config.run.iterations} iterations, one every {c.every}, divides by it",
            f"set it to a multiple of checkpoint.every, such as {c.every}",
        )


def _keep_best(config: RunConfig) -> Iterator[Problem]:
    """A metric that no evaluation makes, or that no evaluation makes at an iteration saved before the last."""
    c, e = config.checkpoint, config.evaluation
    if c.keep_best is None:
        return
    made = [
        f"eval/{held_out.name}/{figure}"
        for held_out in e.sets
        for figure in (
            LOWEST_IS_BEST
            if config.algorithm.supervised
            else (*FIGURES, *(f"pass_at_{k}" for k in powers(held_out.samples_per_prompt)))
        )
    ]
    alone = [held_out.name for held_out in e.sets if held_out.samples_per_prompt < 2]
    if c.keep_best in [f"eval/{name}/majority" for name in alone]:
        yield config.problem(
            "checkpoint.keep_best",
            "one sample a prompt has no majority",
            "set samples_per_prompt of the set to 2 or more, or keep the best by its reward_mean",
        )
    elif c.keep_best not in made:
        yield config.problem(
            "checkpoint.keep_best",
            "no evaluation of evaluation.sets makes this metric"
            + (" with algorithm.loss=sft" if config.algorithm.supervised else ""),
            nearest(c.keep_best, made) if made else "add a set to evaluation.sets, or remove it",
        )
    elif c.every < config.run.iterations <= lcm(c.every, e.every):
        yield config.problem(
            "checkpoint.keep_best",
            f"no iteration before the last is both evaluated, one every {e.every}, and saved, one every {c.every}",
            f"set evaluation.every to {c.every}, as checkpoint.every",
        )


def tracking_problems(config: RunConfig) -> Iterator[Problem]:
    """A tracker that is named twice, and a URI that MLflow would not take or does not get."""
    trackers = config.tracking.trackers
    if len(set(trackers)) < len(trackers):
        yield config.problem("tracking.trackers", "it names one twice", "name each once")
    if config.tracking.uri is not None:
        yield from _uri(config.tracking.uri)
        if "mlflow" not in trackers:
            yield config.problem(
                "tracking.uri",
                "it is MLflow's, which is not among tracking.trackers",
                "add mlflow there, or leave it out",
            )


def _uri(uri: str) -> Iterator[Problem]:
    known = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks")
    head, found, rest = uri.partition("://")
    if not uri.strip():
        yield Problem(
            "tracking.uri", uri, "it is empty", "leave it out for a SQLite file, or give http://host:port"
        )
    elif not found and uri != "databricks":
        yield Problem(
            "tracking.uri",
            uri,
            "not a URI",
            "write sqlite:///path/of/file.db or http://host:port, or leave it out",
        )
    elif found and head.partition("+")[0] not in known:
        yield Problem("tracking.uri", uri, f"MLflow knows no {head}://", f"use one of {', '.join(known)}")
    elif head == "sqlite" and (not rest.startswith("/") or not rest.strip("/")):
        yield Problem("tracking.uri", uri, "it names no file", "write sqlite:///path/of/file.db")
    elif head in ("http", "https") and not _host(uri):
        yield Problem("tracking.uri", uri, "it names no host", "write http://host:port")


def _host(uri: str) -> str | None:
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname


def problems(config: RunConfig) -> list[Problem]:
    """Everything that fields say against each other, all at once; empty when they agree."""
    return [*secrets.problems(config), *between_fields(config)]


def between_fields(config: RunConfig) -> list[Problem]:
    """All problems between fields, without the search of each value for a secret."""
    return [
        *model_problems(config),
        *trainer.problems(config),
        *rollout.problems(config),
        *algorithm.problems(config),
        *data.problems(config),
        *image_rules.problems(config),
        *evaluation_problems(config),
        *checkpoint_problems(config),
        *memory_only("storage.root", config.storage.root),
        *tracking_problems(config),
        *engines.problems(config),
        *placement_problems(config),
        *pipeline.problems(config),
        *eager.problems(config),
        *sync_problems(config),
    ]
