"""The features of millrace that a configuration switches on, and a tiny run that each is added to.

A feature that runs here acts in a whole run on a CPU, and `tests/pairs/signs.py` says how that shows. One that does not names
why, and the test that holds it. Owns no outcome: `tests/pairs/outcomes.py` computes what becomes of two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TEACHER, ENGINE, STORED = "http://teacher.invalid", "http://127.0.0.1:30000", "stored"
BUCKET, WEIGHTS = "s3://bucket", "s3://weights"
"""Stand-ins for what a run gets when it starts: a served teacher, an engine outside, another run's name, and two buckets."""
TOP_P, MEMORY_MB = 0.9, 2048
OWN = "pair_functions"  # the user's module
ITERATIONS, PROMPTS, SAMPLES, LONGEST = 4, 4, 2, 24
BASE: Mapping[str, Any] = MappingProxyType(
    {
        "run.name": "a",
        "run.iterations": ITERATIONS,
        "model.path": "model",
        "data.max_prompt_tokens": 32,
        "data.sources": [{"name": "sums", "path": "sums.jsonl"}],
        "rollout.prompts": PROMPTS,
        "rollout.samples_per_prompt": SAMPLES,
        "rollout.part_groups": 1,
        "rollout.sampling.max_new_tokens": LONGEST,
        "reward.function": f"{OWN}:length",
        "trainer.device": "cpu",
        "trainer.threads": 1,
        "trainer.max_pack_tokens": 512,
        "trainer.optimizer.lr": 1e-3,
        "engines.kind": "embedded",
        "checkpoint.every": ITERATIONS,
        "evaluation.every": ITERATIONS,
        "tracking.trackers": [],
    }
)
"""Four iterations of eight samples each, by field."""


@dataclass(frozen=True)
class Elsewhere:
    """Why a feature does not run here, and the test that runs it."""

    why: str
    test: str


@dataclass(frozen=True)
class Feature:
    """One feature: the fields that switch it on, and those that it needs if nothing else gives them.

    settings: a list is added to the list that is there; any other value is the field's one value.
    needs: left out where the other feature brings something in its place.
    carries: further members of the configuration, as `tests/pairs/members.py` names them, that act with it alone.
    """

    settings: Mapping[str, Any]
    needs: Mapping[str, Any] = field(default_factory=dict)
    carries: tuple[str, ...] = ()
    elsewhere: Elsewhere | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a message may name it by."""
        return (*self.settings, *self.needs)


CORRECTION = {"algorithm.correction.kind": "truncate"}
DIALOGUE = {"rollout.session.function": f"{OWN}:dialogue"}
SESSION = {"rollout.session.max_tokens": 96, "rollout.session.max_turns": 3}
FINISH = {"pipeline.select": "finish", "pipeline.reserve": 0.5, "pipeline.max_staleness": 3}
AHEAD = {"pipeline.ahead": 1}
DISTIL = {"algorithm.distillation_coef": 0.5}
SERVED = {**DISTIL, "algorithm.teacher_server.url": TEACHER, "algorithm.teacher_server.same_tokenizer": True}
GPU = {"engines.kind": "sglang", "trainer.device": "cuda"}
ON_GPUS = "needs a GPU and SGLang"
HELD_OUT = {
    "name": "held_out",
    "path": "held_out.jsonl",
    "sampling": {"max_new_tokens": 8},
}

ROLLOUTS = {
    "session": Feature({**DIALOGUE, **SESSION}),
    "tools": Feature(
        {"rollout.session.tools": [f"{OWN}:note"], **SESSION}, DIALOGUE, ("rollout.session.tools.0.name",)
    ),
    "mcp": Feature(
        {"rollout.session.tools": [{"mcp": {"command": ["@python", "@mcp_server"]}}], **SESSION},
        DIALOGUE,
        ("rollout.session.tools.0.mcp.command", "rollout.session.tools.0.mcp.only"),
    ),
    "environment": Feature({"rollout.session.environment": f"{OWN}:Guess", **SESSION}),
    "named_rollouts": Feature(
        {
            "rollout.session.named": [{"name": "solo", "function": f"{OWN}:solo"}],
            "data.sources": [{"name": "solo", "path": "solo.jsonl"}],
            **SESSION,
        },
        DIALOGUE,
    ),
    "flush": Feature({"rollout.flush_tokens": 16}),
    "admission": Feature({"rollout.admission": "kv"}),
    "routing_replay": Feature(
        {"rollout.routing_replay": True},
        elsewhere=Elsewhere("needs a model with experts", "tests/flows/test_routing_replay_runs.py"),
    ),
    "stops": Feature({"rollout.sampling.stop_regex": ["[0-9]{2}"], "rollout.sampling.stop": ["="]}),
    "top_p": Feature({"rollout.sampling.top_p": TOP_P}),
    "buffer": Feature({"rollout.buffer.share": 0.25, "rollout.buffer.choose": "prioritised"}, CORRECTION),
    "buffer_filter": Feature(
        {"rollout.buffer.share": 0.25, "rollout.buffer.buffer_filter": f"{OWN}:newest"}, CORRECTION
    ),
    "shards": Feature({"placement.task_runner": "ray", "rollout.shards": 2}),
}
PIPELINE = {
    "ahead": Feature(AHEAD, CORRECTION),
    "finish_requests": Feature({**AHEAD, "pipeline.on_update": "finish"}, CORRECTION),
    "retract": Feature({**AHEAD, "pipeline.on_update": "retract"}, CORRECTION),
    "keep": Feature({**AHEAD, "pipeline.on_update": "keep"}, CORRECTION),
    "min_ess": Feature({**AHEAD, "pipeline.min_ess": 0.001}, CORRECTION),
    "finish": Feature(FINISH, CORRECTION, ("pipeline.max_staleness",)),
    "max_token_age": Feature({"algorithm.correction.max_token_age": 1}, {**FINISH, **CORRECTION}),
    "oversample": Feature({"filter.oversample": 0.5}),
    "eager": Feature({"pipeline.eager": True, "pipeline.eager_groups": 1}),
    "sync_every": Feature({"pipeline.sync_every": 2}, CORRECTION),
    "rollouts_only": Feature({"pipeline.rollouts_only": True}),
    "rollouts_from": Feature({"pipeline.rollouts_from": STORED}),
}
ALGORITHMS = {
    "critic": Feature(
        {"algorithm.advantage.kind": "gae"},
        {"algorithm.advantage.critic.lr": 1e-3},
        ("algorithm.preset=ppo",),
    ),
    "returns": Feature(
        {"algorithm.advantage.kind": "reinforce_plus_plus"},
        carries=(
            "algorithm.preset=reinforce_plus_plus",
            "algorithm.preset=reinforce_plus_plus_baseline",
            "algorithm.advantage.kind=reinforce_plus_plus_baseline",
        ),
    ),
    "own_advantage": Feature(
        {"algorithm.advantage.kind": "function", "algorithm.advantage.function": f"{OWN}:signs"}
    ),
    "teacher": Feature(
        {**DISTIL, "algorithm.teacher": "other"},
        carries=("algorithm.preset=opd", "algorithm.advantage.kind=none"),
    ),
    "served_teacher": Feature(SERVED),
    "teacher_top_k": Feature({**SERVED, "algorithm.teacher_server.top_k": 4}),
    "hint": Feature({**SERVED, "algorithm.teacher_server.hint": f"{OWN}:hint"}),
    "kl": Feature({"algorithm.kl_coef": 0.01, "algorithm.kl_target": 0.1}),
    "kl_in_reward": Feature(
        {"algorithm.kl_coef": 0.01, "algorithm.kl_placement": "reward", "algorithm.kl_kind": "k1"},
        {"algorithm.advantage.kind": "reinforce_plus_plus_baseline"},
    ),
    "reference": Feature(
        {"algorithm.reference": "other", "algorithm.reference_update_steps": 1}, {"algorithm.kl_coef": 0.01}
    ),
    "entropy": Feature({"algorithm.entropy_coef": 0.01}),
    "gspo": Feature({"algorithm.loss.kind": "gspo"}, carries=("algorithm.preset=gspo",)),
    "own_loss": Feature({"algorithm.loss.kind": "function", "algorithm.loss.function": f"{OWN}:loss"}),
    "sft": Feature(
        {
            "algorithm.loss.kind": "sft",
            "rollout.samples_per_prompt": 1,
            "rollout.prompts": 8,
            "data.sources": [{"name": "dialogues", "path": "dialogues.jsonl", "loss_on": "assistant"}],
        },
        carries=("data.sources.0.loss_on=assistant", "data.sources.0.loss_on=last_assistant"),
    ),
    "whiten": Feature({"algorithm.whiten": True}),
    "overlong": Feature(
        {"algorithm.overlong.buffer_tokens": 12}, carries=("algorithm.overlong", "algorithm.preset=dapo")
    ),
    "shaping": Feature({"algorithm.shaping": f"{OWN}:halved"}),
    "icepop": Feature(
        {
            "algorithm.correction.kind": "icepop",
            "algorithm.correction.low": 0.5,
            "algorithm.correction.high": 5.0,
        },
        carries=(
            "algorithm.correction.kind=mask",
            "algorithm.correction.kind=reject",
            "algorithm.correction.kind=truncate",
        ),
    ),
    "sequence_masks": Feature({"algorithm.correction.veto": 1e-4, "algorithm.correction.opsm_delta": 0.5}),
    "sampler_ratio": Feature({"algorithm.old_logprobs": "rollout", "algorithm.correction.kind": "none"}),
    "constant": Feature(
        {"algorithm.aggregation": "constant", "algorithm.constant_length": 32},
        carries=("algorithm.aggregation=token_mean", "algorithm.preset=dr_grpo"),
    ),
}
GROUPS = {
    "zero_variance": Feature({"filter.drop_zero_variance": True}),
    "group_filter": Feature(
        {"filter.group_filter": f"{OWN}:drops_some"},
        carries=("filter.reward_band", "filter.max_truncated_share", "filter.max_mean_response_tokens"),
    ),
    "group_reward": Feature({"reward.group": True, "reward.function": f"{OWN}:ranks"}),
    "named_rewards": Feature(
        {
            "reward.named": [{"name": "exact", "function": f"{OWN}:eleven"}],
            "data.sources": [{"name": "graded", "path": "graded.jsonl"}],
        }
    ),
    "remote_limits": Feature({"reward.memory_mb": MEMORY_MB, "reward.max_processes": 64}),
    "mixture": Feature(
        {
            "data.sources": [
                {"name": "second", "path": "second.jsonl", "reward": f"{OWN}:twelve", "weight": 2}
            ]
        },
        carries=("data.sources.0.reward",),
    ),
    "levels": Feature(
        {
            "data.sources": [
                {
                    "name": "growing",
                    "rows": f"{OWN}:growing",
                    "weight": 2,
                    "levels": {"last": 6, "window": 2, "raise_from": -100.0, "groups": 1},
                }
            ]
        },
        carries=("data.sources.0.rows", "data.sources.0.levels", "data.sources.0.levels.first"),
    ),
    "pools": Feature(
        {
            "data.sources": [
                {
                    "name": "few",
                    "path": "few.jsonl",
                    "weight": 2,
                    "pools": {"solved_from": 99.0, "unsolved_to": 98.0},
                }
            ]
        },
        carries=("data.sources.0.pools", "data.sources.0.pools.unsolved_to"),
    ),
    "stages": Feature(
        {
            "data.stages": [
                {"weights": {"sums": 1, "*": 1}, "iterations": 1},
                {"weights": {"sums": 2, "*": 1}},
            ]
        },
        carries=("data.stages.0.iterations", "data.stages.0.reward"),
    ),
    "streamed": Feature({"data.stream_above_rows": 0}),
    "row_sampling": Feature(
        {"data.sources": [{"name": "short", "path": "short.jsonl", "sampling_key": "sampling", "weight": 2}]},
        carries=("data.sources.0.sampling_key",),
    ),
    "pictures": Feature(
        {"data.sources": [{"name": "seen", "path": "seen.jsonl", "images_key": "images"}]},
        {"trainer.kind": "fsdp"},
        ("data.sources.0.images_key", "evaluation.sets.0.images_key"),
        Elsewhere("need a model that sees them", "tests/flows/test_picture_runs.py"),
    ),
    "template": Feature(
        {"data.sources": [{"name": "told", "path": "second.jsonl", "system": "be brief", "weight": 2}]},
        carries=("data.sources.0.system",),
    ),
}
SURROUNDINGS = {
    "evaluation": Feature({"evaluation.sets": [HELD_OUT]}),
    "pass_at_k": Feature(
        {"evaluation.sets": [{**HELD_OUT, "name": "several", "samples_per_prompt": 2, "subset_key": "kind"}]},
        carries=("evaluation.sets.0.subset_key",),
    ),
    "evaluation_ahead": Feature(
        {
            "evaluation.background": True,
            "evaluation.sets": [{**HELD_OUT, "name": "ahead"}],
        }
    ),
    "keep_best": Feature(
        {"checkpoint.keep_best": "eval/best/reward_mean", "evaluation.sets": [{**HELD_OUT, "name": "best"}]}
    ),
    "background_checkpoint": Feature({"checkpoint.background": True}),
    "exports": Feature({"checkpoint.export_every": 1}),
    "tensorboard": Feature({"tracking.trackers": ["tensorboard"]}),
    "trace": Feature({"tracking.trace": 2}),
    "mlflow": Feature(
        {"tracking.trackers": ["mlflow"]}, carries=("tracking.uri", "tracking.system_metrics=False")
    ),
    "s3": Feature({"storage.root": BUCKET}),
    "prepare": Feature({"run.prepare": f"{OWN}:prepare"}),
    "steps": Feature({"trainer.global_batch": 4}),
    "passes": Feature({"trainer.passes": 2}),
    "stored_logprobs": Feature({"trainer.store_logprobs": True}),
    "stages_of_the_model": Feature({"trainer.world_size": 2, "trainer.parallel.pipeline": 2}),
    "fsdp": Feature({"trainer.kind": "fsdp"}),
    "copies_of_weights": Feature(
        {"trainer.parallel.replicate": 2, "trainer.world_size": 2}, {"trainer.kind": "fsdp"}
    ),
    "context": Feature({"trainer.parallel.context": 2, "trainer.world_size": 2}),
    "recompute": Feature({"trainer.recompute": "full"}, carries=("trainer.recompute=selective",)),
    "plain_optimizer": Feature({"trainer.optimizer.distributed": False}),
    "host_optimizer": Feature({"trainer.optimizer.offload": 0.5}),
    "bfloat16": Feature({"model.dtype": "bfloat16"}),
    "lora": Feature(
        {"trainer.lora.rank": 4, "trainer.lora.alpha": 8.0}, carries=("trainer.lora", "trainer.lora.path")
    ),
    "lora_of_experts": Feature(
        {"trainer.lora.rank": 4, "trainer.lora.alpha": 8.0, "trainer.lora.targets": r".*\.experts\..*"},
        elsewhere=Elsewhere(
            "needs a model with experts", "tests/connectors/megatron/test_grouped_adapters.py"
        ),
    ),
}
ENGINES = {
    "two_engines": Feature({"engines.count": 2}),
    "external": Feature({"engines.kind": "external", "engines.addresses": [ENGINE]}),
    "router": Feature(
        {"engines.router.policy": "round_robin"}, {"engines.count": 2}, carries=("engines.router",)
    ),
    "broadcast": Feature({"sync.kind": "broadcast", "sync.bucket_mib": 1}),
    "lora_by_name": Feature({"trainer.lora.rank": 4, "trainer.lora.alpha": 8.0, "sync.lora": "names"}),
    "prompt_gap": Feature({"sync.max_prompt_gap": 0.5}),
    "weights_by_url": Feature({"sync.directory": WEIGHTS}),
    "sglang": Feature(
        GPU,
        carries=("engines.sglang",),
        elsewhere=Elsewhere(ON_GPUS, "tests/gpu/test_run_on_one_gpu.py"),
    ),
    "prefill": Feature(
        {**GPU, "engines.prefill": 1, "engines.count": 2},
        elsewhere=Elsewhere(ON_GPUS, "tests/connectors/sglang/test_prefill.py"),
    ),
    "over_nodes": Feature(
        {**GPU, "engines.gpus": 2, "engines.nodes": 2, "placement.tensor_over_hosts": True},
        elsewhere=Elsewhere(ON_GPUS, "tests/gpu/test_two_nodes_on_gpus.py"),
    ),
    "speculative": Feature(
        {**GPU, "engines.sglang.speculative_algorithm": "NGRAM"},
        elsewhere=Elsewhere(ON_GPUS, "tests/gpu/test_speculative_decoding.py"),
    ),
    "rounded_cache": Feature(
        {**GPU, "engines.sglang.kv_cache_dtype": "fp8_e5m2"},
        CORRECTION,
        elsewhere=Elsewhere(ON_GPUS, "tests/core/config/test_rules.py"),
    ),
    "colocate": Feature(
        {"engines.kind": "sglang", "trainer.device": "cuda", "placement.colocate": True},
        carries=("placement.offload_engines=False", "placement.offload_trainer=False", "sync.kind=ipc"),
        elsewhere=Elsewhere(ON_GPUS, "tests/gpu/test_run_on_one_gpu.py"),
    ),
}
FEATURES: dict[str, Feature] = {
    **ROLLOUTS,
    **PIPELINE,
    **ALGORITHMS,
    **GROUPS,
    **SURROUNDINGS,
    **ENGINES,
}
