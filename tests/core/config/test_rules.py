"""Rules between fields: a table of what clashes, and of what does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from millrace.core.config.reading.load import validate
from millrace.core.config.reading.overrides import apply
from millrace.core.config.rules import problems
from millrace.core.config.run_config import RunConfig
from millrace.core.config.trainer import Parallel

BASE: dict[str, Any] = {
    "run": {"name": "a", "iterations": 10},
    "model": {"path": "m"},
    "data": {"max_prompt_tokens": 100, "sources": [{"name": "sums", "path": "s.jsonl"}]},
    "rollout": {"prompts": 8, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 100}},
    "trainer": {"max_pack_tokens": 400},
    "evaluation": {"sets": [{"name": "held", "path": "h.parquet"}]},
}


SUPERVISED = ["algorithm.loss=sft", "rollout.samples_per_prompt=1"]
OF_MEGATRON = {
    **{f"trainer.parallel.{name}": 2 for name in Parallel.model_fields if name != "sequence"},
    "trainer.parallel.sequence": "true",
    "trainer.megatron.moe_z_loss_coeff": 0.1,
    "trainer.megatron_optimizer.decoupled_weight_decay": "false",
    "trainer.megatron_ddp.bucket_size": 100,
    "trainer.optimizer.offload": 0.5,
}
SPECULATIVE = ["engines.kind=sglang", "engines.sglang.speculative_algorithm=STANDALONE"]
OVER_NODES = ["engines.kind=sglang", "engines.gpus=4", "engines.nodes=2", "placement.tensor_over_hosts=true"]


def values(*overrides: str) -> dict[str, Any]:
    made = copy.deepcopy(BASE)
    for override in overrides:
        apply(made, override)
    return made


def config(*overrides: str) -> RunConfig:
    return RunConfig.model_validate(values(*overrides))


def fields(*overrides: str) -> list[str]:
    """Fields of all problems, whether types or rules find them."""
    sound, wrong = validate(values(*overrides))
    found = wrong if sound is None else problems(sound)
    assert all(problem.reason and problem.remedy for problem in found)
    return [problem.field for problem in found]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.global_batch=8"],
        ["trainer.passes=2"],
        ["pipeline.select=finish", "pipeline.max_staleness=1", "algorithm.correction.max_token_age=0"],
        [
            "pipeline={select: finish, ahead: 1, max_staleness: 3}",
            "algorithm.correction={kind: truncate, max_token_age: 2}",
        ],
        ["rollout.buffer={max_age: 4}", "algorithm.correction={kind: truncate, max_token_age: 3}"],
        ["trainer.world_size=8", "trainer.parallel.tensor=2", "trainer.parallel.pipeline=2"],
        ["trainer.world_size=4", "trainer.parallel.expert=4"],
        ["trainer.world_size=2", "trainer.parallel.tensor=2", "trainer.parallel.sequence=true"],
        ["trainer.max_pack_tokens=200"],
        ["trainer.max_pack_tokens=100", "trainer.parallel.context=2", "trainer.world_size=2"],
        ["engines.max_total_tokens=356"],
        ["engines.kind=sglang", "engines.gpus=2"],
        ["algorithm.loss=sft", "rollout.samples_per_prompt=1"],
        [*SUPERVISED, "data.sources.0.loss_on=assistant", "data.sources.0.label_key=null"],
        [*SUPERVISED, "evaluation.sets.0.loss_on=last_assistant", "checkpoint.keep_best=eval/held/loss"],
        ["checkpoint.every=4", "checkpoint.keep_every=8"],
        ["run.iterations=12", "checkpoint.every=4", "checkpoint.keep_every=6"],
        ["checkpoint.keep_best=eval/held/reward_mean"],
        ["checkpoint.keep_best=eval/held/not_scored", "checkpoint.every=2", "evaluation.every=4"],
        ["tracking.uri=sqlite:////tmp/x.db"],
        ["tracking.uri=https://host:5000"],
        ["tracking.uri=databricks"],
        ["tracking.trackers=[tensorboard, wandb]"],
        ["tracking.trackers=[]"],
        ["tracking.uri=postgresql+psycopg2://me@host/db"],
        ["trainer.schedule.kind=linear", "trainer.schedule.warmup_steps=9"],
        ["trainer.schedule.warmup_steps=1000"],
        ["sync.kind=disk"],
        ["sync.directory=s3://b/w"],
        ["sync.kind=broadcast"],
        ["sync.kind=broadcast", "engines.kind=embedded", "trainer.device=cpu"],
        ["sync.kind=broadcast", "engines.kind=external", "engines.addresses=['http://a:1']"],
        ["engines.kind=external", "engines.addresses=['http://localhost:30000']"],
        [
            "engines.kind=external",
            "engines.addresses=['http://a:1', 'http://b:1']",
            "engines.prefill=1",
            "sync.directory=/shared",
        ],
        ["rollout.sampling.temperature=0.123456789"],
        ["engines.router.policy=manual", "rollout.sampling.temperature=0.123456"],
        ["engines.router={}", "engines.router.options.cache_threshold=0.5"],
        ["engines.router.policy=power_of_two", "engines.count=2"],
    ],
    ids=" ".join,
)
def test_these_agree(overrides: list[str]) -> None:
    assert fields(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["trainer.global_batch=5"], "trainer.global_batch"),
        (["trainer.global_batch=64"], "trainer.global_batch"),
        ([*SUPERVISED, "trainer.passes=2"], "trainer.passes"),
        (["algorithm.preset=rloo", "trainer.passes=2"], "algorithm.loss"),
        (["trainer.world_size=6", "trainer.parallel.context=4"], "trainer.world_size"),
        (["trainer.world_size=6", "trainer.parallel.expert=4"], "trainer.parallel.expert"),
        (
            ["trainer.world_size=6", "trainer.parallel.expert=2", "trainer.parallel.pipeline=6"],
            "trainer.parallel.expert",
        ),
        (["trainer.parallel.virtual=2"], "trainer.parallel.virtual"),
        (["trainer.world_size=2", "trainer.parallel.expert_tensor=4"], "trainer.parallel.expert_tensor"),
        (["trainer.max_pack_tokens=199"], "trainer.max_pack_tokens"),
        (
            ["trainer.max_pack_tokens=100", "trainer.parallel.context=3", "trainer.world_size=2"],
            "trainer.world_size",
        ),
        (
            ["engines.max_total_tokens=355", "evaluation.sets.held.sampling={max_new_tokens: 256}"],
            "engines.max_total_tokens",
        ),
        (["evaluation.sets.held.sampling={max_new_tokens: 70000}"], "engines.max_total_tokens"),
        (["trainer.optimizer.betas=[0.9, 1]"], "trainer.optimizer.betas.1"),
        (
            ["trainer.optimizer.offload=0.5", "trainer.optimizer.distributed=false"],
            "trainer.optimizer.offload",
        ),
        (["trainer.schedule.min_lr=1"], "trainer.schedule.min_lr"),
        (["checkpoint.keep_best=eval/held/reward_maen"], "checkpoint.keep_best"),
        (["checkpoint.keep_best=eval/other/reward_mean"], "checkpoint.keep_best"),
        (["checkpoint.keep_best=reward/mean"], "checkpoint.keep_best"),
        (["checkpoint.keep_best=eval/held/reward_mean", "evaluation.sets=[]"], "checkpoint.keep_best"),
        (
            ["checkpoint.keep_best=eval/held/reward_mean", "checkpoint.every=4", "evaluation.every=3"],
            "checkpoint.keep_best",
        ),
        (
            ["algorithm.preset=ppo", "algorithm.advantage.critic.lr=1e-7", "trainer.schedule.min_lr=5e-7"],
            "trainer.schedule.min_lr",
        ),
        (
            ["trainer.schedule.kind=cosine", "trainer.schedule.warmup_steps=10"],
            "trainer.schedule.warmup_steps",
        ),
        (["algorithm.loss=sft"], "rollout.samples_per_prompt"),
        (["data.sources.0.loss_on=assistant"], "data.sources.sums.loss_on"),
        (["evaluation.sets.0.loss_on=assistant"], "evaluation.sets.held.loss_on"),
        ([*SUPERVISED, "evaluation.sets.0.label_key=null"], "evaluation.sets.held.label_key"),
        ([*SUPERVISED, "checkpoint.keep_best=eval/held/reward_mean"], "checkpoint.keep_best"),
        (["checkpoint.keep_best=eval/held/loss"], "checkpoint.keep_best"),
        (
            [*SUPERVISED, "data.sources.0.loss_on=assistant", "data.sources.0.chat=false"],
            "data.sources.sums.chat",
        ),
        (
            [*SUPERVISED, "data.sources.0.loss_on=assistant", "data.sources.0.label_from_prompt=true"],
            "data.sources.sums.label_from_prompt",
        ),
        (
            ["algorithm.loss=sft", "rollout.samples_per_prompt=1", "data.sources.0.label_key=null"],
            "data.sources.sums.label_key",
        ),
        (["evaluation.sets.1={name: held, path: x.jsonl}"], "evaluation.sets.1.name"),
        (["rollout.sampling.stop_token_ids=[-1]"], "rollout.sampling.stop_token_ids"),
        (["evaluation.sets.held.sampling={stop: ['']}"], "evaluation.sets.held.sampling.stop"),
        (["engines.kind=embedded", "engines.sglang.mem_fraction_static=0.8"], "engines.sglang"),
        (["engines.kind=embedded", "engines.gpus=2"], "engines.gpus"),
        (["sync.kind=ipc"], "sync.kind"),
        (["sync.kind=broadcast", "placement.colocate=true"], "sync.kind"),
        (["sync.kind=broadcast", "engines.kind=embedded"], "sync.kind"),
        (["sync.kind=broadcast", "engines.kind=sglang", "trainer.device=cpu"], "sync.kind"),
        (["engines.addresses=['http://localhost:1']"], "engines.addresses"),
        (["engines.kind=external"], "engines.addresses"),
        (
            ["engines.kind=external", "engines.addresses=['localhost:1']", "sync.directory=/d"],
            "engines.addresses",
        ),
        (
            ["engines.kind=external", "engines.addresses=['http://localhost:1']", "engines.count=2"],
            "engines.count",
        ),
        (["engines.kind=external", "engines.addresses=['http://a:1']"], "sync.directory"),
        (
            ["engines.kind=external", "engines.addresses=['http://localhost:1']", "sync.directory=s3://b/w"],
            "sync.directory",
        ),
        (["sync.directory=memory://w"], "sync.directory"),
        (
            [
                "engines.kind=external",
                "engines.addresses=['http://localhost:1']",
                "engines.sglang.chunked_prefill_size=1024",
            ],
            "engines.sglang",
        ),
        (
            ["engines.router={}", "rollout.sampling.temperature=0.123456789"],
            "rollout.sampling.temperature",
        ),
        (
            ["engines.router={}", "evaluation.sets.held.sampling={top_p: 0.99999999}"],
            "evaluation.sets.held.sampling.top_p",
        ),
        (["engines.router.policy=power_of_two"], "engines.router.policy"),
        (["engines.prefill=1"], "engines.prefill"),
        (["engines.gpus=2", "engines.nodes=2"], "engines.nodes"),
        (["engines.gpus=3", "engines.nodes=2", "placement.tensor_over_hosts=true"], "engines.nodes"),
        ([*OVER_NODES, "engines.count=2", "engines.prefill=1"], "engines.prefill"),
        ([*OVER_NODES, "sync={kind: disk, directory: 's3://b/w'}"], "sync.directory"),
        ([*OVER_NODES, "engines.sglang.pp_size=2"], "engines.sglang.pp_size"),
        (["engines.kind=embedded", "engines.nodes=2"], "engines.nodes"),
        (["engines={kind: external, addresses: ['http://localhost:1'], nodes: 2}"], "engines.nodes"),
        (["engines.kind=sglang", "engines.max_total_tokens=10"], "engines.max_total_tokens"),
        (["sync.kind=disk", "sync.bucket_mib=1"], "sync.bucket_mib"),
        (["engines.prefill=1", "engines.count=2", "engines.kind=embedded"], "engines.prefill"),
        (["engines.prefill=1", "engines.count=2", "engines.router={}"], "engines.router"),
        (
            ["engines.sglang.speculative_algorithm=NGRAM", "sync.kind=disk"],
            "engines.sglang.speculative_algorithm",
        ),
        (
            [*SPECULATIVE, "rollout.sampling.min_p=0.1", "algorithm.correction.kind=none"],
            "rollout.sampling.min_p",
        ),
        ([*SPECULATIVE, "evaluation.sets.held.sampling={min_p: 0.1}"], "evaluation.sets.held.sampling.min_p"),
        (
            ["engines.kind=sglang", "engines.sglang.speculative_algorithm=DFLASH"],
            "engines.sglang.speculative_algorithm",
        ),
        (
            [*SPECULATIVE, "engines.prefill=1", "engines.count=2"],
            "engines.sglang.speculative_algorithm",
        ),
        (
            [
                "engines.prefill=1",
                "engines.count=2",
                "trainer.world_size=2",
                "placement.colocate=true",
                "engines.sglang.disaggregation_transfer_backend=nixl",
            ],
            "engines.sglang.disaggregation_transfer_backend",
        ),
        (["engines.sglang.enable_memory_saver=true"], "engines.sglang.enable_memory_saver"),
        (
            ["engines.sglang.speculative_accept_threshold_acc=0.9"],
            "engines.sglang.speculative_accept_threshold_acc",
        ),
        (["engines.sglang.weight_version=x"], "engines.sglang.weight_version"),
        (["engines.sglang.api_key=secret"], "engines.sglang.api_key"),
        (["engines.sglang.admin_api_key=secret"], "engines.sglang.admin_api_key"),
        (["engines.sglang.ssl_keyfile=k"], "engines.sglang.ssl_keyfile"),
        (["engines.sglang.ssl_certfile=c"], "engines.sglang.ssl_certfile"),
        (["engines.sglang.ssl_ca_certs=c"], "engines.sglang.ssl_ca_certs"),
        (["engines.sglang.ssl_keyfile_password=secret"], "engines.sglang.ssl_keyfile_password"),
        (["engines.sglang.enable_ssl_refresh=true"], "engines.sglang.enable_ssl_refresh"),
        (["engines.sglang.grpc_mode=true"], "engines.sglang.grpc_mode"),
        (["engines.sglang.smg_grpc_mode=true"], "engines.sglang.smg_grpc_mode"),
        (["engines.sglang.nnodes=2"], "engines.sglang.nnodes"),
        (["engines.sglang.node_rank=1"], "engines.sglang.node_rank"),
        (["engines.sglang.dist_init_addr='10.0.0.1:5000'"], "engines.sglang.dist_init_addr"),
        (["engines.sglang.random_seed=3"], "engines.sglang.random_seed"),
        (["engines.sglang.preferred_sampling_params='{}'"], "engines.sglang.preferred_sampling_params"),
        (["engines.sglang.enable_lora=true"], "engines.sglang.enable_lora"),
        (["engines.sglang.lora_paths=[a]"], "engines.sglang.lora_paths"),
        (["engines.sglang.pp_size=2"], "engines.sglang.pp_size"),
        (["engines.sglang.dp_size=2"], "engines.sglang.dp_size"),
        (["engines.router.options.disable_retries=false"], "engines.router.options.disable_retries"),
        (["engines.router.options.dp_aware=true"], "engines.router.options.dp_aware"),
        (["engines.router.options.api_key=secret"], "engines.router.options.api_key"),
        (["data.sources.0.path=s.csv"], "data.sources.sums.path"),
        (["storage.root=memory://x"], "storage.root"),
        (["tracking.uri=sqlite://x.db"], "tracking.uri"),
        (["tracking.trackers=[wandb]", "tracking.uri=https://host:5000"], "tracking.uri"),
        (["tracking.trackers=[mlflow, mlflow]"], "tracking.trackers"),
        (["tracking.uri=http://"], "tracking.uri"),
        (["tracking.uri=http://host:port"], "tracking.uri"),
        (["tracking.uri=gopher://host"], "tracking.uri"),
        (["tracking.uri=''"], "tracking.uri"),
        (["trainer.megatron.hidden_dropout=0.1"], "trainer.megatron.hidden_dropout"),
        (["trainer.megatron.bf16=true"], "trainer.megatron.bf16"),
        *(
            (["trainer.rank=mine:Rank", "trainer.world_size=2", f"{field}={value}"], field)
            for field, value in OF_MEGATRON.items()
        ),
        (["engines.sglang.tp_size=2"], "engines.sglang.tp_size"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature"),
    ],
    ids=str,
)
def test_these_clash(overrides: list[str], field: str) -> None:
    assert fields(*overrides) == [field]


def test_engines_that_keep_their_memory_may_move_caches_by_nixl() -> None:
    prefill = ["engines.prefill=1", "engines.count=2", "engines.sglang.disaggregation_transfer_backend=nixl"]
    shared = ["trainer.world_size=2", "placement.colocate=true", "placement.offload_engines=false"]
    assert fields(*prefill, *shared) == []


def test_a_password_is_not_repeated() -> None:
    found = problems(RunConfig.model_validate({**BASE, "tracking": {"uri": "http://me:hush@host"}}))
    assert "hush" not in str(found[0])


@pytest.mark.parametrize("kind", ["sglang", "embedded", "external"])
@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "ssl_keyfile_password"])
def test_an_engines_secret_is_not_repeated(name: str, kind: str) -> None:
    sound, wrong = validate({**BASE, "engines": {"kind": kind, "sglang": {name: "hush"}}})
    found = wrong if sound is None else problems(sound)
    assert name in str(found)
    assert "hush" not in str(found)


def test_attention_may_be_data_parallel_within_an_engine() -> None:
    engine = ["engines.kind=sglang", "engines.gpus=2", "engines.sglang.dp_size=2"]
    assert fields(*engine, "engines.sglang.enable_dp_attention=true") == []


def test_all_come_at_once() -> None:
    found = fields(
        "trainer.global_batch=5",
        "sync.kind=ipc",
        "engines.gpus=2",
        "engines.kind=embedded",
        "algorithm.loss.dual_clip=1.1",
    )
    assert sorted(found) == ["algorithm.loss.dual_clip", "engines.gpus", "sync.kind", "trainer.global_batch"]


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ([], "disk"),
        (["placement.colocate=true"], "ipc"),
        (["engines.kind=sglang"], "broadcast"),
        (["engines.kind=sglang", "placement.colocate=true"], "ipc"),
        (["engines.kind=sglang", "sync.kind=disk"], "disk"),
        (["engines.kind=embedded"], "disk"),
        (["engines.kind=external", "engines.addresses=['http://localhost:1']"], "disk"),
    ],
    ids=str,
)
def test_auto_takes_the_fastest_way_to_the_engines(overrides: list[str], kind: str) -> None:
    assert config(*overrides).sync_kind == kind


@pytest.mark.parametrize(
    ("overrides", "in_background"),
    [
        ([], False),
        (["engines.kind=sglang"], True),
        (["engines.kind=sglang", "trainer.device=cpu"], False),
        (["engines.kind=sglang", "checkpoint.background=false"], False),
        (["checkpoint.background=true"], True),
    ],
    ids=str,
)
def test_on_gpus_checkpoints_are_written_in_the_background(overrides: list[str], in_background: bool) -> None:
    assert config(*overrides).saves_in_background == in_background
