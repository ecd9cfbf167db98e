"""What a run learns by, as lines of the plan: the algorithm as it is after its preset, the filter, the learning rate.

Every field of `algorithm` that is not at its default is named; a test holds that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import BaseModel

from millrace.core.config import RunConfig
from millrace.core.config.algorithm import Algorithm
from millrace.core.config.filter import Filter
from millrace.core.config.parts.restart import ANY_START, changes
from millrace.core.config.rollout import Buffer

Line = tuple[str, str]


def learning(config: RunConfig) -> Iterator[Line]:
    """Name and text of each line."""
    a = config.algorithm
    if a.supervised:
        dialogues = any(source.loss_on != "answer" for source in config.data.sources)
        what = "what the assistant says in dialogues" if dialogues else "reference answers (labels)"
        yield "algorithm", f"supervised: the likelihood of {what}"
    else:
        yield "algorithm", _preset(a)
        yield (
            "advantage",
            f"{_choice(a.advantage)}; {'whitened' if a.whiten else 'not whitened'} over the batch",
        )
        yield "loss", _choice(a.loss)
    yield "aggregation", _aggregation(config)
    if not a.supervised:
        yield "KL", _kl(a)
        yield "old log-probs", a.old_logprobs
        yield from _more(a)
        yield "dynamic sampling", _dynamic_sampling(config)
        if config.filter.group_filter:
            share = config.filter.max_failed_share
            yield "filter", f"{_choice(config.filter.group_filter)}; it may fail on {share:g} of the prompts"
    if config.rollout.buffer:
        yield "reuse", _reuse(config.rollout.buffer, config.rollout.prompts)
    yield "learning rate", _learning_rate(config)


def _preset(a: Algorithm) -> str:
    of_preset = Algorithm.model_validate({"preset": a.preset})
    differs = [change.path for change in changes(of_preset, a, above=ANY_START)]
    return f"preset {a.preset}" + (f", but for its {', '.join(differs)}" if differs else "")


def _choice(section: BaseModel) -> str:
    """A section by its kind, what it does, and its fields."""
    values = section.model_dump(mode="json")
    kind = values.pop("kind", None)
    what = (type(section).__doc__ or "").partition(". ")[0].rstrip(".")
    fields = _fields(values)
    return (f"{kind}: {what}" if kind else "") + (f" ({fields})" if kind and fields else fields)


def _fields(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in values.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{_fields(value)}}}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _aggregation(config: RunConfig) -> str:
    a = config.algorithm
    if a.aggregation != "constant":
        return a.aggregation
    return f"constant: divided by {a.constant_length or config.rollout.longest_response} tokens a sample"


def _kl(a: Algorithm) -> str:
    if a.kl_coef == 0:
        return "none, and no reference model"
    steered = f", steered to {a.kl_target:g} nats a token over {a.kl_horizon} samples" if a.kl_target else ""
    unbiased = ", weighted by pi / pi_old" if a.kl_unbiased else ""
    every = a.reference_update_steps
    reference = f"{a.reference}" if a.reference else "the initial weights"
    if every:
        reference = f"{reference}, and from step {every} on the policy of every {every} steps"
    return f"{a.kl_kind} in the {a.kl_placement}, coefficient {a.kl_coef:g}{steered}{unbiased}; the reference is {reference}"


def _more(a: Algorithm) -> Iterator[Line]:
    """What is off by default, where it is on."""
    c = a.correction
    if c.kind != "none" or any(bound is not None for bound in (c.veto, c.opsm_delta, c.max_token_age)):
        yield "correction", _fields(c.model_dump())
    if a.overlong:
        buffer = a.overlong.buffer_tokens
        tokens = f"the last {buffer} tokens" if buffer else "the last fifth of the tokens"
        yield "overlong penalty", f"up to {a.overlong.factor:g} over {tokens} of the budget"
    if a.shaping:
        yield "shaping", _choice(a.shaping)
    if a.entropy_coef:
        yield "entropy bonus", f"coefficient {a.entropy_coef:g}"
    if a.teacher or a.teacher_server or a.distillation_coef:
        yield "teacher", f"{_where(a)}, coefficient {a.distillation_coef:g}"
    if not a.on_policy_guard:
        yield "on-policy guard", "off"


def _dropped(f: Filter) -> Iterator[str]:
    """The groups that settings drop, as the rest of `groups ...`."""
    if f.drop_zero_variance:
        yield "whose rewards are all equal"
    if f.reward_band:
        yield "whose mean reward is outside {:g} to {:g}".format(*f.reward_band)
    if f.max_truncated_share is not None:
        yield f"with more than {f.max_truncated_share:g} of the responses truncated"
    if f.max_mean_response_tokens is not None:
        yield f"of more than {f.max_mean_response_tokens} tokens a response"


def _where(a: Algorithm) -> str:
    if a.teacher_server is None:
        return str(a.teacher)
    model = f", model {a.teacher_server.model}" if a.teacher_server.model else ""
    top = f", its {a.teacher_top_k} likeliest tokens" if a.teacher_top_k else ""
    hint = f", hints by {_choice(a.teacher_server.hint)}" if a.teacher_server.hint else ""
    return f"served at {a.teacher_server.url} ({a.teacher_server.protocol}{model}){top}{hint}"


def _dynamic_sampling(config: RunConfig) -> str:
    f = config.filter
    dropped = list(_dropped(f))
    if not dropped:
        return "off: groups whose rewards are all equal are trained on, without a gradient"
    spare = round(f.refill_factor * config.rollout.prompts)
    begun = math.ceil(f.oversample * config.rollout.prompts)
    ahead = f", {begun} of which generate from the start" if begun else ""
    then = "the earliest of them are kept" if f.when_insufficient == "keep" else "the run stops"
    return (
        f"on: groups {' or '.join(dropped)} are dropped, and up to {spare} prompts an iteration drawn in their place{ahead}; "
        f"when these are used up {then}"
    )


def _reuse(b: Buffer, prompts: int) -> str:
    order = f"{b.choose} by {b.strata}" if b.choose == "stratified" else b.choose
    own = f", then {b.buffer_filter.function}" if b.buffer_filter else ""
    return (
        f"a share of {b.share:g}, {b.wanted(prompts)} of {prompts} groups, come from the buffer as far as it holds enough: trained "
        f"fewer than {b.max_uses} times, at most {b.max_age} weight versions old, {order}{own}"
    )


def _learning_rate(config: RunConfig) -> str:
    o, s, critic = config.trainer.optimizer, config.trainer.schedule, config.algorithm.critic
    steps = config.run.iterations * config.steps_per_iteration
    text = f"{s.warmup_steps} steps of warm-up to " if s.warmup_steps else ""
    text += f"{o.lr:g}"
    if s.kind == "constant":
        text += f", then constant to the end (step {steps})"
    else:
        text += f", then {s.kind} to {s.min_lr:g} at step {s.decay_steps or steps}"
        text += f" of {steps}" if s.decay_steps else ""
    if critic:
        text += f"; of the critic {f'({critic.path}) ' if critic.path else ''}{critic.lr:g}"
        if critic.schedule:
            text += f" by its schedule ({_fields(critic.schedule.model_dump())})"
        text += f", which trains alone for {critic.only_steps} steps" if critic.only_steps else ""
    return text
