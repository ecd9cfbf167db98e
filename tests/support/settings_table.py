"""Every field of the configuration: whether a resume and a branch may change it, and what shows that a change acts.

refused    the start is refused, naming the field
trained    tests/connectors/megatron/test_settings_that_act.py trains with it: rates, AdamW's numbers, KL coefficient
rebuilt    the trainer ranks and engines read it where they are built, and a start under another configuration ends those
           that it finds: the digest that an actor carries differs
a module   reads it in the driver, which is a new process at each start, and keeps nothing of it in the run folder
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """What is expected of a field, and the proof of what may change."""

    resume: bool
    branch: bool
    proof: str


REBUILT, TRAINED_WITH, REFUSED = "rebuilt", "trained", "refused"
NEITHER = Row(False, False, REFUSED)


def _rows(resume: bool, branch: bool, proof: str, *paths: str) -> dict[str, Row]:
    return {path: Row(resume, branch, proof) for path in paths}


def _any_start(proof: str, *paths: str) -> dict[str, Row]:
    return _rows(True, True, proof, *paths)


def _branch(proof: str, *paths: str) -> dict[str, Row]:
    return _rows(False, True, proof, *paths)


def _under(prefix: str, names: str) -> list[str]:
    return [f"{prefix}.{name}" for name in names.split()]


SAMPLING = (
    "temperature top_p top_k min_p max_new_tokens stop stop_token_ids stop_regex ignore_eos skip_special_tokens "
    "min_new_tokens frequency_penalty presence_penalty repetition_penalty logit_bias json_schema regex ebnf"
)
FUNCTION = "function options"
CHAT = "tools_key chat_template_kwargs chat_template_kwargs_key sampling_key label_from_prompt loss_on images_key"
ROWS: dict[str, Row] = {
    **dict.fromkeys(
        (
            "run.seed",
            *_under("model", "path revision tokenizer chat_template dtype"),
            *_under("data.sources.0", "name weight prompt_key label_key metadata_key extra_keys chat system"),
            *_under("data.sources.0", CHAT),
            *_under("data.sources.0.rows", FUNCTION),
            *_under("data.sources.0.levels", "first last window raise_from groups"),
            *_under("data.sources.0.pools", "solved_from unsolved_to solved_share unsolved_share"),
            *_under("data.stages.0", "weights iterations reward groups"),
            *_under("data", "shuffle max_prompt_tokens max_image_tokens stream_above_rows"),
            *_under("rollout", "prompts samples_per_prompt"),
            *_under("pipeline", "sync_every rollouts_only rollouts_from"),
            *_under("trainer", "kind rank global_batch passes optimizer.distributed megatron_optimizer"),
            *_under("trainer.lora", "rank alpha targets path"),
        ),
        NEITHER,
    ),
    **_branch("flows/driver/run_record.py", "run.name"),
    **_branch("tasks/runtime/tracking.py", "run.experiment"),
    **_any_start(TRAINED_WITH, "run.iterations"),
    **_any_start("flows/preflight/check_model.py", "model.preset"),
    **_any_start("flows/drive.py", "run.import_from", *_under("run.prepare", FUNCTION)),
    **_any_start("core/config/run_config.py", "run.progress_timeout_s"),
    **_any_start("tasks/data/prompt_dataset.py", "data.sources.0.path", "data.max_quarantined_share"),
    **_any_start("flows/driver/run_record.py", "data.allow_changes"),
    **_any_start("tasks/runtime/runtime.py", "storage.root"),
    **_branch("tasks/rollout.py", *_under("rollout.sampling", SAMPLING)),
    **_branch(
        "connectors/user_code/session_worker.py",
        *_under("rollout.session.function", FUNCTION),
        *_under("rollout.session.environment", FUNCTION),
    ),
    **_branch("core/hooks/rollout_selection.py", *_under("rollout.session.named.0", f"{FUNCTION} name")),
    **_branch("core/sessions/tools.py", *_under("rollout.session.tools.0", "function options name")),
    **_branch(
        "connectors/user_code/mcp_server.py",
        *_under("rollout.session.tools.0.mcp", "command url env headers only"),
    ),
    **_branch(
        "tasks/generation/sessions/session_rollout.py", *_under("rollout.session", "max_turns max_tokens")
    ),
    **_branch("flows/preflight/check_session.py", "rollout.session.history"),
    **_any_start(
        "connectors/user_code/session_pool.py",
        *_under("rollout.session", "workers timeout_s rollout_timeout_s max_processes"),
    ),
    **_any_start("connectors/user_code/session_worker.py", "rollout.session.memory_mb"),
    **_any_start("tasks/generation/sessions/runner.py", *_under("rollout.session", "max_rollouts max_calls")),
    **_branch("core/accounts/buffer.py", *_under("rollout.buffer", "choose strata")),
    **_branch("core/accounts/buffer.py", *_under("rollout.buffer.buffer_filter", FUNCTION)),
    **_branch("tasks/sample_prompts.py", *_under("rollout.buffer", "share max_age max_uses")),
    **_any_start("tasks/generation/admission.py", *_under("rollout", "max_concurrency admission")),
    **_any_start("tasks/shards/attempts.py", "rollout.shards"),
    **_any_start("core/sharding.py", "placement.task_runner"),
    **_any_start("core/config/plan/layout.py", "placement.tensor_over_hosts"),
    **_any_start("tasks/rollout.py", *_under("rollout", "part_groups max_failed_share")),
    **_any_start("tasks/generation/answers.py", "rollout.flush_tokens"),
    **_branch("tasks/rollout.py", "rollout.routing_replay"),
    **_any_start("connectors/engines/fleet.py", *_under("rollout", "progress_timeout_s attempts")),
    **_branch("tasks/runtime/scoring.py", *_under("reward", f"{FUNCTION} group")),
    **_branch("core/hooks/reward_selection.py", *_under("reward.named.0", f"{FUNCTION} group name")),
    **_branch("core/hooks/reward_selection.py", *_under("data.sources.0.reward", f"{FUNCTION} group")),
    **_branch("core/hooks/reward_selection.py", *_under("evaluation.sets.0.reward", f"{FUNCTION} group")),
    **_any_start(
        "tasks/runtime/scoring.py", *_under("reward", "workers concurrency timeout_s memory_mb max_processes")
    ),
    **_any_start("tasks/reward.py", "reward.max_failed_share"),
    **_branch(
        "core/hooks/group_filters.py", *_under("filter", "drop_zero_variance reward_band max_truncated_share")
    ),
    **_branch(
        "core/hooks/group_filters.py",
        "filter.max_mean_response_tokens",
        *_under("filter.group_filter", FUNCTION),
    ),
    **_branch("tasks/sample_prompts.py", "filter.refill_factor"),
    **_any_start("tasks/filter.py", "filter.when_insufficient"),
    **_any_start("tasks/batching/batch_selection.py", "filter.oversample"),
    **_any_start("tasks/batching/judged_groups.py", "filter.max_failed_share"),
    **_branch(
        REBUILT,
        *_under(
            "algorithm",
            "preset whiten old_logprobs aggregation constant_length kl_kind kl_placement kl_unbiased",
        ),
        *_under(
            "algorithm",
            "kl_target kl_horizon reference reference_update_steps entropy_coef distillation_coef teacher",
        ),
        *_under(
            "algorithm.advantage",
            "kind divide_by_std epsilon gamma lam critic.path critic.clip critic.only_steps",
        ),
        *_under("algorithm.advantage", FUNCTION),
        *_under("algorithm.loss", "kind clip_low clip_high dual_clip temperatures"),
        *_under("algorithm.loss", FUNCTION),
        *_under("algorithm.overlong", "buffer_tokens factor"),
        *_under("algorithm.shaping", FUNCTION),
        *_under("algorithm.correction", "kind level low high veto opsm_delta max_token_age"),
        "trainer.megatron",
    ),
    **_any_start(
        "connectors/teachers/served_teacher.py",
        *_under("algorithm.teacher_server", "url protocol key concurrency timeout_s attempts"),
    ),
    **_branch("connectors/teachers/served_teacher.py", *_under("algorithm.teacher_server", "model top_k")),
    **_branch("tasks/runtime/hints.py", *_under("algorithm.teacher_server.hint", FUNCTION)),
    **_any_start("connectors/teachers/teacher_tokenizer.py", "algorithm.teacher_server.same_tokenizer"),
    **_branch(TRAINED_WITH, "algorithm.kl_coef", "algorithm.advantage.critic.lr"),
    **_any_start(REBUILT, "algorithm.on_policy_guard"),
    **_branch(TRAINED_WITH, *_under("trainer.optimizer", "lr betas eps weight_decay clip_grad")),
    **_branch(
        TRAINED_WITH, *_under("algorithm.advantage.critic.schedule", "kind warmup_steps decay_steps min_lr")
    ),
    **_branch(TRAINED_WITH, *_under("trainer.schedule", "kind warmup_steps decay_steps min_lr")),
    **_any_start(
        REBUILT,
        *_under(
            "trainer",
            "world_size device max_pack_tokens recompute logprob_chunk_tokens store_logprobs threads deterministic "
            "megatron_ddp",
        ),
        "trainer.optimizer.offload",
        *_under(
            "trainer.parallel", "tensor pipeline virtual context replicate expert expert_tensor sequence"
        ),
        *_under(
            "engines",
            "kind host start_timeout_s restarts count gpus nodes prefill sglang threads max_running",
        ),
        *_under("engines", "max_total_tokens addresses key router.policy router.options"),
        *_under("placement", "colocate kernel_cache offload_engines offload_trainer ray_address wait_s"),
        *_under("sync", "kind directory bucket_mib lora"),
    ),
    **_any_start("flows/driver/iteration_slots.py", *_under("pipeline", "ahead on_update")),
    **_any_start("flows/driver/iteration_slots.py", "pipeline.min_ess"),
    **_any_start("tasks/sample_prompts.py", *_under("pipeline", "select reserve")),
    **_any_start("core/config/pipeline.py", "pipeline.max_staleness", "pipeline.eager_groups"),
    **_any_start("tasks/context.py", "pipeline.eager"),
    **_any_start("tasks/train_step.py", "sync.max_logprob_gap"),
    **_any_start("tasks/weight_check.py", "sync.max_prompt_gap"),
    **_any_start("tasks/checkpoint.py", *_under("checkpoint", "keep_last keep_every keep_best")),
    **_any_start("core/periodic.py", *_under("checkpoint", "every export_every export_last")),
    **_any_start(
        "tasks/evaluate.py",
        *_under(
            "evaluation.sets.0",
            f"name path prompt_key label_key metadata_key extra_keys chat system samples_per_prompt {CHAT} "
            "correct_from subset_key",
        ),
        *_under("evaluation.sets.0.sampling", SAMPLING),
    ),
    **_any_start("core/periodic.py", "evaluation.every"),
    **_any_start("core/config/run_config.py", "checkpoint.background", "evaluation.background"),
    **_any_start("tasks/runtime/tracking.py", *_under("tracking", "trackers uri system_metrics")),
    **_any_start("tasks/reporting/report.py", "tracking.samples", "tracking.rollout_traces"),
    **_any_start("tasks/context.py", "tracking.trace"),
}
TRAINED = {path for path, row in ROWS.items() if row.proof == TRAINED_WITH}
