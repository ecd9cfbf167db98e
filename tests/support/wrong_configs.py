"""Wrong configurations, each with the field that the answer must name. What they are wrong beside lies in `write_good`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

GOOD: dict[str, Any] = {
    "run": {"name": "a", "iterations": 4},
    "model": {"path": "model"},
    "storage": {"root": "runs"},
    "data": {"max_prompt_tokens": 32, "sources": [{"name": "sums", "path": "train.jsonl"}]},
    "rollout": {"prompts": 8, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 16}},
    "trainer": {"global_batch": 16, "max_pack_tokens": 512},
    "evaluation": {"sets": [{"name": "held_out", "path": "train.jsonl"}]},
}

VOTED = ["checkpoint.keep_best=eval/held_out/majority", "evaluation.sets.0.samples_per_prompt=2"]
TIS = "algorithm.correction.kind=truncate"
PLAY = '''
class Game:
    recovery = "restart"

async def play(session):
    await session.generate()

async def alone():
    pass

def score(sample):
    return 0.5

def voted(sample):
    import millrace
    return millrace.RewardResult(0.5, answer="")

def look(where: str) -> str:
    """Look somewhere."""

def silent(where: str) -> str:
    pass

def untyped(where):
    """Look somewhere."""
'''
FORGETS = (  # of earlier turns it keeps no more than their first letters
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{{ message['content'] if loop.last else message['content'][:3] }}<eos>{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# what is wrong, overrides of the good configuration, the field that is named
WEIGHED = "algorithm.correction.kind=truncate"
SERVED = ["algorithm.preset=opd", "algorithm.teacher_server.url=http://127.0.0.1:9"]
WRONG: list[tuple[str, list[str], str]] = [
    ("too stale by its own bound", ["pipeline.ahead=2", "pipeline.max_staleness=1", WEIGHED], "pipeline.max_staleness"),
    ("older tokens without a weight", ["pipeline.ahead=1"], "algorithm.correction.kind"),
    ("deferred tokens without a weight", ["pipeline.select=finish", "pipeline.max_staleness=1"],
     "algorithm.correction.kind"),
    ("groups that finish first, and none deferred", ["pipeline.select=finish"], "pipeline.max_staleness"),
    ("an age bound that bounds nothing", ["pipeline.ahead=1", "algorithm.correction.max_token_age=1", WEIGHED],
     "algorithm.correction.max_token_age"),
    ("an age bound without older tokens", ["algorithm.correction.max_token_age=0"],
     "algorithm.correction.max_token_age"),
    ("an age bound that leaves all out", ["pipeline.ahead=2", "algorithm.correction.max_token_age=1", WEIGHED],
     "algorithm.correction.max_token_age"),
    ("an age bound on the tokens of one ratio",
     ["pipeline.select=finish", "pipeline.max_staleness=1", "algorithm.correction.max_token_age=0",
      "algorithm.preset=gspo"],
     "algorithm.correction.max_token_age"),
    ("a deferred dialogue", ["pipeline.select=finish", "rollout.session.function=play:play"],
     "pipeline.select"),
    ("supervised and ahead", ["algorithm.preset=sft", "rollout.samples_per_prompt=1", "pipeline.ahead=1"],
     "pipeline.ahead"),
    ("segments of turns", ["rollout.flush_tokens=64", "rollout.session={function: 'soak:f'}"], "rollout.flush_tokens"),
    ("segments through a router", ["rollout.flush_tokens=64", "engines.router={}"], "rollout.flush_tokens"),
    ("experts of a dense model's engine", ["rollout.routing_replay=true"], "rollout.routing_replay"),
    ("experts of answers without an engine",
     ["rollout.routing_replay=true", "algorithm.preset=sft", "rollout.samples_per_prompt=1"], "rollout.routing_replay"),
    ("experts for another trainer", ["rollout.routing_replay=true", "trainer.rank=own:Rank"], "rollout.routing_replay"),
    ("experts of segments", ["rollout.routing_replay=true", "rollout.flush_tokens=64"], "rollout.flush_tokens"),
    ("experts through a router", ["rollout.routing_replay=true", "engines.router={}"], "rollout.routing_replay"),
    ("experts that another engine chose",
     ["rollout.routing_replay=true", "engines={kind: sglang, count: 2, prefill: 1}"], "engines.prefill"),
    ("experts of a later pass",
     ["rollout.routing_replay=true", "pipeline.ahead=1", "pipeline.on_update=retract"], "pipeline.on_update"),
    ("experts of drafted tokens",
     ["rollout.routing_replay=true", "engines={kind: sglang, sglang: {speculative_algorithm: NGRAM}}"],
     "engines.sglang.speculative_algorithm"),
    ("experts of a cache on the host",
     ["rollout.routing_replay=true", "engines={kind: sglang, sglang: {enable_hierarchical_cache: true}}"],
     "engines.sglang.enable_hierarchical_cache"),
    ("experts that are routed again",
     ["rollout.routing_replay=true", "trainer.recompute=selective", "trainer.megatron.recompute_modules=[moe]"],
     "trainer.megatron.recompute_modules"),
    ("the engines' own option of experts",
     ["engines={kind: sglang, sglang: {enable_return_routed_experts: true}}"],
     "engines.sglang.enable_return_routed_experts"),
    ("megatron's own option of experts", ["trainer.megatron.moe_enable_routing_replay=true"],
     "trainer.megatron.moe_enable_routing_replay"),
    ("weights of another format than are sent", ["engines={kind: sglang, sglang: {quantization: fp8}}"],
     "engines.sglang.quantization"),
    ("rounded keys and values without a weight", ["engines={kind: sglang, sglang: {kv_cache_dtype: fp8_e4m3}}"],
     "algorithm.correction.kind"),
    ("a buffer and ahead", ["pipeline.ahead=1", "rollout.buffer.share=0.25", WEIGHED], "rollout.buffer"),
    ("ahead on shared GPUs", ["pipeline.ahead=1", "placement.colocate=true", WEIGHED], "pipeline.ahead"),
    ("unknown key", ["run.iteratoins=3"], "run.iteratoins"),
    ("unknown section", ["reword.timeout_s=3"], "reword"),
    ("unknown key in a list's item", ["data.sources.sums.weigth=2"], "data.sources.sums.weigth"),
    ("wrong type", ["rollout.prompts=many"], "rollout.prompts"),
    ("text for a section", ["trainer.optimizer=fast"], "trainer.optimizer"),
    ("negative number", ["trainer.optimizer.lr=-1e-5"], "trainer.optimizer.lr"),
    ("zero samples", ["rollout.samples_per_prompt=0"], "rollout.samples_per_prompt"),
    ("a group of one", ["rollout.samples_per_prompt=1", "trainer.global_batch=8"], "rollout.samples_per_prompt"),
    ("bad run name", ["run.name=My Run"], "run.name"),
    ("override without value", ["run.name"], "run.name"),
    ("override below a value", ["run.name.x=1"], "run.name.x"),
    ("override of no item", ["data.sources.products.weight=2"], "data.sources.products"),
    ("batch does not divide", ["trainer.global_batch=12"], "trainer.global_batch"),
    ("layout does not divide the world", ["trainer.parallel.tensor=2"], "trainer.world_size"),
    (
        "layout does not divide the heads",
        ["trainer.world_size=3", "trainer.parallel.tensor=3"],
        "trainer.parallel.tensor",
    ),
    (
        "stages do not divide the layers",
        ["trainer.world_size=4", "trainer.parallel.pipeline=4"],
        "trainer.parallel.pipeline",
    ),
    ("experts of a dense model", ["trainer.world_size=2", "trainer.parallel.expert=2"], "trainer.parallel.expert"),
    ("sequence parallel alone", ["trainer.parallel.sequence=true"], "trainer.parallel.sequence"),
    ("pack too small", ["trainer.max_pack_tokens=40"], "trainer.max_pack_tokens"),
    ("longer than the model's positions", ["rollout.sampling.max_new_tokens=4000"], "rollout.sampling.max_new_tokens"),
    ("KV cache too small", ["engines.max_total_tokens=40"], "engines.max_total_tokens"),
    ("no such model", ["model.path=no-model"], "model.path"),
    ("a folder that is no model", ["model.path=empty"], "model.path"),
    ("unsupported family", ["model.path=bert"], "model.path"),
    ("weights are missing", ["model.path=weightless"], "model.path"),
    ("quantised weights", ["model.path=quantised"], "model.path"),
    ("a model key of a value that is not supported", ["model.path=capped"], "model.path"),
    ("a tensor that no parameter takes", ["model.path=biased"], "model.path"),
    ("no tokenizer", ["model.tokenizer=empty"], "model.tokenizer"),
    ("no such data", ["data.sources.sums.path=no.jsonl"], "data.sources.sums.path"),
    ("data of unknown format", ["data.sources.sums.path=train.csv"], "data.sources.sums.path"),
    ("no slice", ["data.sources.sums.path=train.jsonl@[3]"], "data.sources.sums.path"),
    ("a folder without prompts", ["data.sources.sums.path=empty"], "data.sources.sums.path"),
    ("a pattern that names nothing", ["data.sources.sums.path=no-*.jsonl"], "data.sources.sums.path"),
    ("rows that are no JSON", ["data.sources.sums.path=garbage.jsonl"], "data.sources.sums.path"),
    ("no rows", ["data.sources.sums.path=nothing.jsonl"], "data.sources.sums.path"),
    ("missing key", ["data.sources.sums.prompt_key=question"], "data.sources.sums.prompt_key"),
    (
        "missing column",
        ["data.sources.sums.path=train.parquet", "data.sources.sums.prompt_key=question"],
        "data.sources.sums.prompt_key",
    ),
    ("a torn Parquet file", ["data.sources.sums.path=torn.parquet"], "data.sources.sums.path"),
    ("missing label key", ["data.sources.sums.label_key=solution"], "data.sources.sums.label_key"),
    ("missing metadata key", ["data.sources.sums.metadata_key=more"], "data.sources.sums.metadata_key"),
    ("missing extra key", ["data.sources.sums.extra_keys=[extra_info.index]"], "data.sources.sums.extra_keys"),
    ("missing column of tools", ["data.sources.sums.tools_key=tools"], "data.sources.sums.tools_key"),
    ("missing column of template variables", ["data.sources.sums.chat_template_kwargs_key=own"],
     "data.sources.sums.chat_template_kwargs_key"),
    ("missing column of sampling", ["data.sources.sums.sampling_key=own"], "data.sources.sums.sampling_key"),
    ("a penalty that rows of their own length never pay", ["data.sources.sums.sampling_key=own", "algorithm.preset=dapo"],
     "data.sources.sums.sampling_key"),
    ("sampling of rows for supervised training", ["data.sources.sums.sampling_key=own", "algorithm.loss=sft",
      "rollout.samples_per_prompt=1", "trainer.global_batch=8"], "data.sources.sums.sampling_key"),
    ("a variable that the template does not read", ["data.sources.sums.chat_template_kwargs={thinkng: true}"],
     "data.sources.sums.chat_template_kwargs"),
    ("a variable that the template gets from millrace", ["data.sources.sums.chat_template_kwargs={messages: []}"],
     "data.sources.sums.chat_template_kwargs"),
    ("no answers in the prompts", ["data.sources.sums.label_from_prompt=true"], "data.sources.sums.label_from_prompt"),
    ("whole dialogues in RL", ["data.sources.sums.loss_on=assistant"], "data.sources.sums.loss_on"),
    ("held-out dialogues in RL", ["evaluation.sets.held_out.loss_on=assistant"], "evaluation.sets.held_out.loss_on"),
    ("no label for the reward", ["data.sources.sums.path=unlabelled.jsonl"], "data.sources.sums.label_key"),
    ("prompts too long", ["data.max_prompt_tokens=2"], "data.max_prompt_tokens"),
    (
        "one name twice",
        ['data.sources=[{name: x, path: train.jsonl}, {name: x, path: train.jsonl}]'],
        "data.sources.1.name",
    ),
    ("bad template", ["model.chat_template=unclosed.jinja"], "model.chat_template"),
    ("template that fails", ["model.chat_template=failing.jinja"], "model.chat_template"),
    ("template that drops the prompt", ["model.chat_template=deaf.jinja"], "model.chat_template"),
    ("no such template", ["model.chat_template=no.jinja"], "model.chat_template"),
    (
        "template against system messages",
        ["model.chat_template=no_system.jinja", "data.sources.sums.system=Be brief."],
        "data.sources.sums.system",
    ),
    ("no template", ["model.tokenizer=untemplated"], "model.chat_template"),
    ("root is a file", ["storage.root=train.jsonl"], "storage.root"),
    ("root of nobody", ["storage.root=/proc/millrace"], "storage.root"),
    ("root in memory", ["storage.root=memory://runs"], "storage.root"),
    ("unknown storage", ["storage.root=ftps4://runs"], "storage.root"),
    ("a bucket that does not answer", ["storage.root=s3://bucket/runs"], "storage.root"),
    ("no such reward module", ["reward.function=no.such.module:score"], "reward.function"),
    ("no such reward", ["reward.function=millrace.core.rewards.text:exact"], "reward.function"),
    ("reward without a colon", ["reward.function=exact_match"], "reward.function"),
    ("reward with another signature", ["reward.function=hooks_of_a_user:no_sample"], "reward.function"),
    ("reward's module fails", ["reward.function=broken_hooks_of_a_user:score"], "reward.function"),
    ("unknown option of the reward", ["reward.options.stripped=true"], "reward.options"),
    ("no such reward of a source", ["data.sources.sums.reward=no.such.module:score"], "data.sources.sums.reward.function"),
    ("no such reward of a held-out set", ["evaluation.sets.held_out.reward=no.such.module:score"],
     "evaluation.sets.held_out.reward.function"),
    ("no such reward by name", ["reward.named={code: 'no.such.module:score'}"], "reward.named.code.function"),
    ("two rewards of one name",
     ["reward.named=[{name: a, function: 'millrace.core.rewards.text:contains'}, {name: a, function: 'millrace.core.rewards.text:contains'}]"],
     "reward.named.1.name"),
    ("a mixture of a reward that is not there",
     ["reward={function: 'millrace.core.rewards.format:mixture', options: {parts: [{function: 'no.such.module:score'}]}}"],
     "reward.options.parts.0.function"),
    ("a tournament by a comparison that is not there",
     ["reward={function: 'millrace.core.rewards.tournament.group_reward:tournament', group: true, options: {compare: 'no.such.module:closer'}}"],
     "reward.options.compare.function"),
    ("a tournament by a comparison of one sample",
     ["reward={function: 'millrace.core.rewards.tournament.group_reward:tournament', group: true, "
      "options: {compare: 'millrace.core.rewards.text:contains'}}"],
     "reward.options.compare.function"),
    ("an option that the comparison does not take",
     ["reward={function: 'millrace.core.rewards.tournament.group_reward:tournament', group: true, "
      "options: {compare: {function: 'hooks_of_a_user:closer', options: {far: 1}}}}"],
     "reward.options.compare.options"),
    ("rows that name no reward", ["reward.named={code: 'millrace.core.rewards.text:contains'}",
     "data.sources.sums.path=names_a_reward.jsonl"], "data.sources.sums.path"),
    ("a group reward that is none", ["reward.group=true"], "reward.function"),
    ("too little memory", ["reward.memory_mb=1"], "reward.memory_mb"),
    ("filter with another signature", ["filter.group_filter=hooks_of_a_user:no_sample"], "filter.group_filter.function"),
    ("unknown option of a filter",
     ["filter.group_filter={function: 'millrace.core.hooks.group_filters:not_all_wrong', options: {wrongs: 1}}"],
     "filter.group_filter.options"),
    ("a band upside down", ["filter.reward_band=[0.8, 0.2]"], "filter.reward_band"),
    ("a band without an end", ["filter.reward_band=[0.2]"], "filter.reward_band"),
    ("a share above 1", ["filter.max_truncated_share=1.5"], "filter.max_truncated_share"),
    ("no tokens", ["filter.max_mean_response_tokens=0"], "filter.max_mean_response_tokens"),
    ("a filter of slime's that is not there", ["filter.group_filter='slime:no.such.check'"], "filter.group_filter.function"),
    ("a filter without slime's arguments", ["filter.group_filter='slime:hooks_of_a_user.no_sample'"],
     "filter.group_filter.function"),
    *((f"slime's signature for {field}", [f"{field}={value}"], f"{field}.function") for field, value in {
        "algorithm.advantage": "{kind: function, function: 'slime:hooks_of_a_user.no_sample'}",
        "algorithm.loss": "{kind: function, function: 'slime:hooks_of_a_user.no_sample'}",
        "algorithm.shaping": "'slime:hooks_of_a_user.no_sample'",
    }.items()),
    ("slime's signature for a buffer filter",
     ["rollout.buffer={buffer_filter: 'slime:hooks_of_a_user.no_sample'}", "algorithm.correction.kind=truncate"],
     "rollout.buffer.buffer_filter.function"),
    ("slime's signature for rows", ["data.sources=[{name: own, rows: 'slime:hooks_of_a_user.no_sample'}]"],
     "data.sources.own.rows.function"),
    ("no such estimator", ["algorithm.advantage={kind: function, function: 'no.such.module:f'}"],
     "algorithm.advantage.function"),
    ("a loss without its function", ["algorithm.loss=function"], "algorithm.loss.function"),
    ("a shaping without a colon", ["algorithm.shaping=shorter"], "algorithm.shaping.function"),
    ("two trainers", ["trainer.kind=fsdp", "trainer.rank=own:Rank"], "trainer.rank"),
    ("a layout for FSDP", ["trainer.kind=fsdp", "trainer.world_size=2", "trainer.parallel.tensor=2"],
     "trainer.parallel.tensor"),
    ("megatron's options for FSDP", ["trainer.kind=fsdp", "trainer.megatron.moe_z_loss_coeff=0.1"],
     "trainer.megatron.moe_z_loss_coeff"),
    ("megatron's optimizer for FSDP", ["trainer.kind=fsdp", "trainer.megatron_optimizer.optimizer_cpu_offload=true"],
     "trainer.megatron_optimizer.optimizer_cpu_offload"),
    ("megatron's wrapper for FSDP", ["trainer.kind=fsdp", "trainer.megatron_ddp.bucket_size=1000"],
     "trainer.megatron_ddp.bucket_size"),
    ("adapters for your trainer", ["trainer.rank=own:Rank", "trainer.lora={}"], "trainer.lora"),
    ("parts of layers again for FSDP", ["trainer.kind=fsdp", "trainer.recompute=selective"], "trainer.recompute"),
    ("a whole optimizer for FSDP", ["trainer.kind=fsdp", "trainer.optimizer.distributed=false"],
     "trainer.optimizer.distributed"),
    ("contexts that do not divide FSDP's ranks", ["trainer.kind=fsdp", "trainer.world_size=3", "trainer.parallel.context=2"],
     "trainer.parallel.context"),
    ("copies that do not divide FSDP's ranks", ["trainer.kind=fsdp", "trainer.world_size=3", "trainer.parallel.replicate=2"],
     "trainer.parallel.replicate"),
    ("copies for megatron-core", ["trainer.world_size=2", "trainer.parallel.replicate=2"], "trainer.parallel.replicate"),
    ("a critic for FSDP", ["trainer.kind=fsdp", "algorithm.preset=ppo"], "algorithm.advantage.kind"),
    ("experts for FSDP", ["trainer.kind=fsdp", "rollout.routing_replay=true"], "rollout.routing_replay"),
    ("no such trainer", ["trainer.rank=no.such.module:Rank"], "trainer.rank"),
    ("a trainer without methods", ["trainer.rank=collections:Counter"], "trainer.rank"),
    ("a trainer without a colon", ["trainer.rank=Rank"], "trainer.rank"),
    ("no such prepare", ["run.prepare=no.such.module:f"], "run.prepare.function"),
    ("unknown loss", ["algorithm.loss=gspoo"], "algorithm.loss.kind"),
    ("a field of another loss", ["algorithm.loss=cispo", "algorithm.loss.dual_clip=3"], "algorithm.loss.dual_clip"),
    ("a field of another estimator", ["algorithm.advantage.gamma=0.9"], "algorithm.advantage.gamma"),
    ("a field of another engine", ["engines.kind=embedded", "engines.gpus=2"], "engines.gpus"),
    ("external engines without addresses", ["engines.kind=external"], "engines.addresses"),
    ("a field of another transport", ["sync=disk", "sync.bucket_mib=64"], "sync.bucket_mib"),
    ("a field that moved", ["algorithm.clip_high=0.3"], "algorithm.clip_high"),
    ("a field that was renamed", ["filter.function=a.b:c"], "filter.function"),
    ("unknown preset", ["algorithm.preset=grppo"], "algorithm.preset"),
    (
        "truncated sampling and importance ratios",
        ["rollout.sampling.top_p=0.9", "algorithm.correction.kind=truncate"],
        "rollout.sampling.top_p",
    ),
    ("critic's GAE in a sequence loss", ["algorithm.preset=ppo", "algorithm.loss=gspo"], "algorithm.loss"),
    ("no such teacher", ["algorithm.preset=opd", "algorithm.teacher=no-model"], "algorithm.teacher"),
    ("a quantised teacher", ["algorithm.preset=opd", "algorithm.teacher=quantised"], "algorithm.teacher"),
    ("a teacher with biases", ["algorithm.preset=opd", "algorithm.teacher=biased"], "algorithm.teacher"),
    ("no such reference", ["algorithm.kl_coef=0.1", "algorithm.reference=no-model"], "algorithm.reference"),
    ("a reference of another architecture", ["algorithm.kl_coef=0.1", "algorithm.reference=biased"], "algorithm.reference"),
    ("a reference without a KL", ["algorithm.reference=model"], "algorithm.reference"),
    ("no such critic", ["algorithm.preset=ppo", "algorithm.advantage.critic.path=no-model"], "algorithm.advantage.critic.path"),
    ("a critic's decay shorter than its warm-up", ["algorithm.preset=ppo",
      "algorithm.advantage.critic.schedule={kind: linear, warmup_steps: 99}"], "algorithm.advantage.critic.schedule.warmup_steps"),
    ("a critic's rate that ends above its peak", ["algorithm.preset=ppo",
      "algorithm.advantage.critic.schedule={kind: linear, min_lr: 1}"], "algorithm.advantage.critic.schedule.min_lr"),
    ("two teachers", [*SERVED, "algorithm.teacher=biased"], "algorithm.teacher"),
    ("a served teacher without weight", ["algorithm.teacher_server.url=http://nowhere"], "algorithm.distillation_coef"),
    ("a served teacher at another temperature", [*SERVED, "rollout.sampling.temperature=0.7"], "rollout.sampling.temperature"),
    ("a served teacher without a name", [*SERVED, "algorithm.teacher_server.protocol=vllm"], "algorithm.teacher_server.model"),
    ("a name that SGLang has no place for", [*SERVED, "algorithm.teacher_server.model=m"], "algorithm.teacher_server.model"),
    ("likeliest tokens as text alone", [*SERVED, "algorithm.teacher_server.protocol=openai", "algorithm.teacher_server.model=m", "algorithm.teacher_server.top_k=4"], "algorithm.teacher_server.top_k"),
    ("a hint for several turns", [*SERVED, "algorithm.teacher_server.hint=a:b", "rollout.session.function=a:b"], "algorithm.teacher_server.hint"),
    ("a hint with another signature", [*SERVED, "algorithm.teacher_server.hint=hooks_of_a_user:no_sample"], "algorithm.teacher_server.hint.function"),
    ("a secret in a configuration", [*SERVED, "algorithm.teacher_server.key=abc"], "algorithm.teacher_server.key"),
    ("a teacher's key that is not set", [*SERVED, "algorithm.teacher_server.key=${env:NOT_SET_AT_ALL}"], "algorithm.teacher_server.key"),
    ("no teacher at the address", SERVED, "algorithm.teacher_server.url"),
    ("a session that nothing drives", ["rollout.session={}"], "rollout.session"),
    ("a session for supervised training", ["rollout.session.function=play:play", "algorithm.loss=sft",
      "rollout.samples_per_prompt=1", "trainer.global_batch=8"], "rollout.session"),
    ("a function and an environment", ["rollout.session.function=play:play",
      "rollout.session.environment=play:Game"], "rollout.session.environment"),
    ("an environment with tools", ["rollout.session.environment=play:Game", "rollout.session.tools=[play:look]"],
      "rollout.session.tools"),
    ("two tools of one name", ["rollout.session.function=play:play",
      "rollout.session.tools=[play:look, {function: other:look}]"], "rollout.session.tools"),
    ("a rollout function that is not there", ["rollout.session.function=play:no_such"],
      "rollout.session.function.function"),
    ("a rollout function that takes no session", ["rollout.session.function=play:alone"],
      "rollout.session.function.function"),
    ("a rollout by name that is not there", ["rollout.session.function=play:play",
      "rollout.session.named={solo: 'play:no_such'}"], "rollout.session.named.solo.function"),
    ("two rollouts of one name", ["rollout.session.function=play:play",
      "rollout.session.named=[{name: a, function: 'play:play'}, {name: a, function: 'play:play'}]"],
      "rollout.session.named.1.name"),
    ("rows that name no rollout", ["rollout.session.function=play:play", "rollout.session.named={solo: 'play:play'}",
      "data.sources.sums.path=names_a_rollout.jsonl"], "data.sources.sums.path"),
    ("options that an environment does not take",
      ["rollout.session.environment={function: play:Game, options: {x: 1}}"], "rollout.session.environment.options"),
    ("a tool without a docstring", ["rollout.session.function=play:play", "rollout.session.tools=[play:silent]"],
      "rollout.session.tools.0.function"),
    ("a tool without type hints", ["rollout.session.function=play:play", "rollout.session.tools=[play:untyped]"],
      "rollout.session.tools.0.function"),
    ("tools that the template does not show", ["rollout.session.tools=[play:look]"], "model.chat_template"),
    ("a template that rewrites turns", ["rollout.session.function=play:play",
      "model.chat_template=forgets.jinja"], "model.chat_template"),
    ("a dialogue longer than a pack", ["rollout.session.function=play:play", "rollout.session.max_tokens=600"],
      "trainer.max_pack_tokens"),
    ("a buffer without a correction", ["rollout.buffer={share: 0.5}", "rollout.prompts=8"], "algorithm.correction.kind"),
    ("a buffer that gives all groups", ["rollout.buffer={share: 0.99}", TIS], "rollout.buffer.share"),
    ("a share above 1 of the buffer", ["rollout.buffer={share: 1.5}", TIS], "rollout.buffer.share"),
    ("a buffer of groups that are trained once", ["rollout.buffer={max_uses: 1}", TIS], "rollout.buffer.max_uses"),
    ("a buffer whose groups are too old at once", ["rollout.buffer={share: 0.5, max_age: 1}", TIS], "rollout.buffer.max_age"),
    ("no such buffer filter", ["rollout.buffer={buffer_filter: 'no.such.module:f'}", TIS], "rollout.buffer.buffer_filter.function"),
    ("a bound on the effective sample size of a run that is not ahead", ["pipeline.min_ess=0.5", TIS], "pipeline.min_ess"),
    ("a bound on the effective sample size without weights", ["pipeline={ahead: 1, min_ess: 0.5}", "placement.colocate=false",
      "algorithm.old_logprobs=rollout"], "pipeline.min_ess"),
    ("an evaluation of supervised training in the background", ["evaluation.background=true", "algorithm.loss=sft",
      "rollout.samples_per_prompt=1", "trainer.global_batch=8"], "evaluation.background"),
    ("a buffer for supervised training", ["rollout.buffer={}", "algorithm.loss=sft",
      "rollout.samples_per_prompt=1", "trainer.global_batch=8"], "rollout.buffer"),
    ("top-k of nothing", ["rollout.sampling.top_k=0"], "rollout.sampling.top_k"),
    ("penalties in rollouts that train", ["rollout.sampling.repetition_penalty=1.1"], "rollout.sampling.repetition_penalty"),
    ("a form of answers without a grammar backend", ["evaluation.sets.held_out.sampling.json_schema={type: object}"],
      "evaluation.sets.held_out.sampling.json_schema"),
    ("a bias of no token", ["evaluation.sets.held_out.sampling.logit_bias={99999: 1}"],
      "evaluation.sets.held_out.sampling.logit_bias"),
    ("a stop of no token", ["rollout.sampling.stop_token_ids=[99999]"], "rollout.sampling.stop_token_ids"),
    ("empty stop string", ['rollout.sampling.stop=[""]'], "rollout.sampling.stop"),
    ("greedy group in an evaluation", ["evaluation.sets.held_out.samples_per_prompt=4",
      "evaluation.sets.held_out.sampling.temperature=0"], "evaluation.sets.held_out.samples_per_prompt"),
    ("no such evaluation set", ["evaluation.sets.held_out.path=no.jsonl"], "evaluation.sets.held_out.path"),
    ("colocation", ["placement.colocate=true"], "placement.colocate"),
    ("sync by NCCL", ["sync.kind=nccl"], "sync.kind"),
    ("GPU memory handed over between GPUs", ["sync.kind=ipc"], "sync.kind"),
    ("sync folder is missing", ["sync.directory=no/folder"], "sync.directory"),
    ("sync folder in a bucket that does not answer", ["sync.directory=s3://bucket/weights"], "sync.directory"),
    ("sync folder in no storage", ["sync.directory=ftps4://weights"], "sync.directory"),
    ("a comparison at another temperature", ["sync.max_prompt_gap=0.02", "rollout.sampling.temperature=0.7"], "sync.max_prompt_gap"),
    ("kernels in no storage", ["placement.kernel_cache=ftps4://kernels"], "placement.kernel_cache"),
    ("kernels in memory", ["placement.kernel_cache=memory://kernels"], "placement.kernel_cache"),
    ("kernels in a bucket without a name", ["placement.kernel_cache=s3://"], "placement.kernel_cache"),
    ("no Ray there", ["placement.ray_address=127.0.0.1:1"], "placement.ray_address"),
    ("host of others", ["engines.host=192.0.2.1"], "engines.host"),
    ("tracking without a URI", ["tracking.uri=mlflow.db"], "tracking.uri"),
    ("password in the tracking URI", ["tracking.uri=http://me:secret@host"], "tracking.uri"),
    ("option megatron does not have", ["trainer.megatron.moe_router_topkk=2"], "trainer.megatron.moe_router_topkk"),
    ("option that would do nothing", ["trainer.megatron.fp8=e4m3"], "trainer.megatron.fp8"),
    ("option of experts in a dense model", ["trainer.megatron.moe_z_loss_coeff=0.1"], "trainer.megatron.moe_z_loss_coeff"),
    ("stages that leave a layer out", ["trainer.world_size=2", "trainer.parallel.pipeline=2", "trainer.megatron.num_layers_in_first_pipeline_stage=9"], "trainer.megatron.num_layers_in_first_pipeline_stage"),
    ("option that trainer.optimizer has", ["trainer.megatron_optimizer.adam_eps=1e-6"], "trainer.megatron_optimizer.adam_eps"),
    ("wrapper option that does nothing alone", ["trainer.megatron_ddp.bucket_size=1000"], "trainer.megatron_ddp.bucket_size"),
    ("option that follows from another", ["trainer.megatron.num_layers=2"], "trainer.megatron.num_layers"),
    ("option that millrace sets", ["engines.sglang.port=30000"], "engines.sglang.port"),
    ("decay shorter than its warm-up",
     ["trainer.schedule.kind=cosine", "trainer.schedule.warmup_steps=99"], "trainer.schedule.warmup_steps"),
    ("a checkpoint that never comes",
     ["run.iterations=10", "checkpoint.every=4", "checkpoint.keep_every=9"], "checkpoint.keep_every"),
    ("a metric that nothing makes", ["checkpoint.keep_best=eval/nowhere/reward_mean"], "checkpoint.keep_best"),
    ("a majority of one sample", ["checkpoint.keep_best=eval/held_out/majority"], "checkpoint.keep_best"),
    ("a majority without answers", [*VOTED, "reward.function=millrace.core.rewards.text:contains"],
     "checkpoint.keep_best"),
    ("a majority without answers in the set's reward",
     [*VOTED, "evaluation.sets.0.reward.function=millrace.core.rewards.text:contains"], "checkpoint.keep_best"),
    ("a majority without answers in a reward of the user's", [*VOTED, "reward.function=play:score"],
     "checkpoint.keep_best"),
]  # fmt: skip

TEXTS: list[tuple[str, str, str]] = [
    ("no YAML", "run: {name: a\nmodel: [", "line 2"),
    ("a tab", "run:\n\tname: a\n", "line 2"),
    ("a key twice", "run: {name: a}\nmodel: {path: m}\nrun: {name: b}\n", "line 3"),
    ("a list", "- run\n", "mapping"),
    ("nothing", "", "data: missing"),
]


def write_good(folder: Path, numbers: int = 5) -> None:
    """The good configuration (run.yaml) and all files, good and bad, that it and the wrong ones name.

    numbers: how many there are that its data adds, each to each: 5 give 25 rows, which a check reads soon.
    """
    import shutil

    import pyarrow as pa
    import pyarrow.parquet as pq
    from safetensors.torch import load_file, save_file

    from millrace.connectors.huggingface.tiny import build_tiny_model

    model = build_tiny_model(folder / "model")
    (folder / "run.yaml").write_text(yaml.safe_dump(GOOD))
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(numbers) for b in range(numbers)]
    lines = {
        "train.jsonl": rows,
        "unlabelled.jsonl": [{"prompt": row["prompt"]} for row in rows],
        "names_a_reward.jsonl": [{**row, "metadata": {"reward": "codes"}} for row in rows],
        "names_a_rollout.jsonl": [{**row, "metadata": {"rollout": "duet"}} for row in rows],
        "nothing.jsonl": [],
    }
    for name, kept in lines.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    (folder / "play.py").write_text(PLAY)
    (folder / "other.py").write_text(PLAY)
    (folder / "forgets.jinja").write_text(FORGETS)
    (folder / "garbage.jsonl").write_text("1+1=2\n" * 5)
    (folder / "train.csv").write_text("prompt,label\n1+1=,2\n")
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "torn.parquet").write_bytes((folder / "train.parquet").read_bytes()[:200])
    (folder / "empty").mkdir()
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text('{"model_type": "bert"}')
    shutil.copytree(model, folder / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(model, folder / "untemplated", ignore=shutil.ignore_patterns("*.safetensors", "*.jinja"))
    config = json.loads((model / "config.json").read_text())
    keys = {
        "quantised": {"quantization_config": {"quant_method": "fp8"}},
        "capped": {"hidden_act": "relu"},
    }
    for name in ("quantised", "capped", "biased"):
        shutil.copytree(model, folder / name)
        (folder / name / "config.json").write_text(json.dumps({**config, **keys.get(name, {})}))
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "biased" / "model.safetensors")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "untemplated" / "tokenizer_config.json").write_text(json.dumps(settings))
    every = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    templates = {
        "unclosed": "{% for m in messages %}{{ m['content'] }}",
        "failing": "{{ messages[7]['content']['text'] }}",
        "deaf": "{{ messages | length }}",
        "no_system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + every,
    }
    for name, text in templates.items():
        (folder / f"{name}.jinja").write_text(text)
    (folder / "hooks_of_a_user.py").write_text(
        "def no_sample():\n    return 0.0\n\n\ndef no_rows(key):\n    return []\n\n\ndef closer(first, second):\n    return 0.5\n"
    )
    (folder / "broken_hooks_of_a_user.py").write_text("def score(sample):\n    return NOTHING\n1 / 0\n")
