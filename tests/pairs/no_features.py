"""Members of the configuration that are no feature, by the reason. A new member stands here or belongs to a feature."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SAMPLING_OF_EVALUATIONS = " ".join(
    f"evaluation.sets.0.sampling.{name}"
    for name in [
        "min_p",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        "skip_special_tokens=False",
        "min_new_tokens",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "json_schema",
        "regex",
        "ebnf",
    ]
)
NO_FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "a number or a name of what is there in each run": "run.seed model.revision trainer.threads engines.threads "
        "trainer.optimizer.weight_decay engines.key algorithm.teacher_server.key algorithm.teacher_server.model",
        "arguments that a feature's own function gets": "run.prepare.options data.sources.0.rows.options "
        "data.sources.0.reward.options rollout.session.function.options rollout.session.named.0.options "
        "rollout.session.environment.options rollout.session.tools.0.options rollout.buffer.buffer_filter.options reward.options "
        "reward.named.0.options filter.group_filter.options algorithm.advantage.options algorithm.shaping.options "
        "algorithm.loss.options algorithm.teacher_server.hint.options evaluation.sets.0.reward.options",
        "how a file of rows is read, before any other part sees them": "data.sources.0.path data.sources.0.extra_keys "
        "data.sources.0.chat=False data.sources.0.tools_key data.sources.0.chat_template_kwargs "
        "data.sources.0.chat_template_kwargs_key "
        "data.sources.0.label_from_prompt data.shuffle=False evaluation.sets.0.extra_keys evaluation.sets.0.chat=False "
        "evaluation.sets.0.system evaluation.sets.0.tools_key evaluation.sets.0.chat_template_kwargs "
        "evaluation.sets.0.chat_template_kwargs_key evaluation.sets.0.sampling_key evaluation.sets.0.label_from_prompt "
        "evaluation.sets.0.loss_on=assistant evaluation.sets.0.loss_on=last_assistant",
        "with which compiled kernels a process starts, not what they compute: tests/connectors/sglang/test_process.py": (
            "placement.kernel_cache"
        ),
        "another trainer, whose run is tests/flows/test_another_trainer.py": "trainer.rank",
        "sets fields of `trainer`, `engines` and `placement` for a published model: tests/core/config/test_model_presets.py": (
            "model.preset"
        ),
        "where files are that each run reads": "run.import_from model.tokenizer model.chat_template",
        "what the tiny run has in each pair": "model.dtype=float32 trainer.device=cpu engines.kind=embedded "
        "placement.task_runner=local sync.kind=disk",
        "a formula on the same numbers as the feature of its field": "algorithm.preset=cispo algorithm.preset=rloo "
        "algorithm.preset=max_rl algorithm.advantage.kind=leave_one_out algorithm.advantage.kind=max_rl "
        "algorithm.advantage.divide_by_std=False algorithm.loss.kind=cispo algorithm.loss.kind=sapo algorithm.loss.kind=reinforce "
        "algorithm.loss.dual_clip algorithm.correction.level=sequence_product algorithm.correction.level=sequence_geometric "
        "algorithm.kl_kind=k2 algorithm.kl_kind=low_var algorithm.kl_kind=abs algorithm.kl_unbiased "
        "algorithm.old_logprobs=recompute rollout.buffer.choose=stratified rollout.buffer.strata=reward "
        "algorithm.advantage.critic.path algorithm.advantage.critic.only_steps",
        "another way to the same servers": "algorithm.teacher_server.protocol=vllm algorithm.teacher_server.protocol=openai "
        "engines.router.policy=random engines.router.policy=power_of_two engines.router.policy=manual engines.router.options "
        "rollout.session.tools.0.mcp.url rollout.session.tools.0.mcp.env rollout.session.tools.0.mcp.headers",
        "a learning rate by the number of the step": "algorithm.advantage.critic.schedule "
        "algorithm.advantage.critic.schedule.kind=linear algorithm.advantage.critic.schedule.kind=cosine "
        "algorithm.advantage.critic.schedule.warmup_steps algorithm.advantage.critic.schedule.decay_steps "
        "algorithm.advantage.critic.schedule.min_lr trainer.schedule.kind=linear trainer.schedule.kind=cosine "
        "trainer.schedule.warmup_steps trainer.schedule.decay_steps trainer.schedule.min_lr",
        "how single tokens are drawn or ended, as `stops` and `top_p` do": "rollout.sampling.min_p rollout.sampling.stop_token_ids "
        "rollout.sampling.ignore_eos rollout.sampling.skip_special_tokens=False",
        "refused in what is trained": "rollout.sampling.min_new_tokens rollout.sampling.frequency_penalty "
        "rollout.sampling.presence_penalty rollout.sampling.logit_bias rollout.sampling.json_schema rollout.sampling.regex "
        "rollout.sampling.ebnf",
        "how a set's answers are drawn, which no other part sees": SAMPLING_OF_EVALUATIONS,
        "how a set's or a row's answers are scored, as `mixture`, `named_rewards` and `group_reward` do": "evaluation.sets.0.reward "
        "evaluation.sets.0.reward.group data.sources.0.reward.group reward.named.0.group",
        "what stops a run, or what it lets pass": "data.allow_changes filter.when_insufficient=stop "
        "algorithm.on_policy_guard=False rollout.session.history=append",
        "options of megatron-core, each with its row in tests/connectors/megatron/test_options.py": "trainer.megatron "
        "trainer.megatron_optimizer trainer.megatron_ddp trainer.parallel.sequence "
        "trainer.parallel.expert_tensor trainer.deterministic=False",
        "which checkpoints and exports stay": "checkpoint.keep_every checkpoint.export_last=False",
        "needs a cluster: tests/flows/test_two_nodes.py, tests/connectors/ray/test_placement.py": "placement.ray_address",
        "needs an account: tests/connectors/test_other_trackers.py": "tracking.trackers=wandb",
    }
)


def no_features() -> dict[str, str]:
    """By member, why it is no feature."""
    return {member: why for why, names in NO_FEATURES.items() for member in names.split()}
