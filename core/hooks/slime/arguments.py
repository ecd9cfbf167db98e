"""The args of slime's hooks: settings of a run under slime's names. Pure.

A hook that reads another name gives it in its function's options; `check` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from millrace.core.config import RunConfig

OF_SCORING = {"reward_key": None}
"""Arguments of rewards and filters besides their options."""
OF_GENERATION = {
    "ci_test": False,
    "custom_generate_function_path": None,
    "custom_rm_path": None,
    "debug_rollout_only": False,
    "debug_train_only": False,
    "mask_offpolicy_in_partial_rollout": False,
    "multimodal_keys": None,
    "partial_rollout": False,  # an answer that is cut continues by itself
    "reward_key": None,
    "rm_type": None,
    "rollout_skip_special_tokens": False,
    "router_policy": None,
    "sglang_dp_size": 1,
    "sglang_enable_deterministic_inference": False,
    "sglang_model_routers": None,
    "sglang_reasoning_parser": None,
    "sglang_speculative_algorithm": None,
    "sglang_tool_call_parser": None,
    "use_rollout_routing_replay": False,
    "use_slime_router": False,
}


OF_A_ROLLOUT = (
    "rollout_max_response_len",
    "rollout_stop",
    "rollout_stop_token_ids",
    "rollout_temperature",
    "rollout_top_k",
    "rollout_top_p",
    "sampling_params",
    "sglang_router_ip",
    "sglang_router_port",
)
"""Further arguments of a generation: its sampling, and the address of its engine."""


def run_arguments(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that a generation may read."""
    rollout, session = config.rollout, config.rollout.session
    assert session is not None, "a function makes the rollouts"
    longest = config.data.max_prompt_tokens + rollout.longest_response
    return {
        **OF_GENERATION,
        "apply_chat_template": any(source.chat for source in config.data.sources),
        "apply_chat_template_kwargs": dict(config.data.sources[0].chat_template_kwargs),
        "context_parallel_size": config.trainer.parallel.context,
        "eval_max_context_len": longest,
        "eval_max_response_len": rollout.longest_response,
        "global_batch_size": config.trainer.global_batch,
        "group_rm": config.reward.group,
        "hf_checkpoint": config.model.path,
        "max_tokens_per_gpu": config.trainer.max_pack_tokens,
        "max_turns": session.max_turns,
        "n_samples_per_prompt": rollout.samples_per_prompt,
        "num_rollout": config.run.iterations,
        "pipeline_model_parallel_size": config.trainer.parallel.pipeline,
        "rollout_batch_size": rollout.prompts,
        "rollout_max_context_len": longest,
        "rollout_max_prompt_len": config.data.max_prompt_tokens,
        "rollout_seed": config.run.seed,
        "rollout_shuffle": config.data.shuffle,
        "seed": config.run.seed,
        "sglang_server_concurrency": rollout.max_concurrency,
        "tensor_model_parallel_size": config.trainer.parallel.tensor,
    }


def sampling_arguments(sampling: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """How the rollouts of a task are sampled. asked: the sampling_params that its function is given."""
    return {
        "rollout_max_response_len": sampling["max_new_tokens"],
        "rollout_stop": sampling["stop"] or None,
        "rollout_stop_token_ids": sampling["stop_token_ids"] or None,
        "rollout_temperature": sampling["temperature"],
        "rollout_top_k": sampling["top_k"],
        "rollout_top_p": sampling["top_p"],
        "sampling_params": dict(asked),
    }


def address_arguments(base_url: str, api_key: str) -> dict[str, Any]:
    """The address of the rollout's own engine."""
    place = urlsplit(base_url)
    return {
        "sglang_router_ip": f"session:{quote(api_key)}@{place.hostname}",
        "sglang_router_port": place.port,
    }
