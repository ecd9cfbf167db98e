"""Rules of `algorithm`: combinations that make no sense, each with its reason."""

from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.run_config import RunConfig

TOKEN_LEVEL = ("gae", "reinforce_plus_plus")
RATIO_LOSSES = ("clipped", "gspo", "cispo", "sapo", "function")


def problems(config: RunConfig) -> Iterator[Problem]:
    """Everything wrong with the section."""
    yield from _estimator(config)
    yield from _loss(config)
    yield from _kl(config)
    yield from _correction(config)
    yield from _max_token_age(config)
    yield from _truncated_sampling(config)


def _estimator(config: RunConfig) -> Iterator[Problem]:
    a, filter = config.algorithm, config.filter
    if a.supervised:
        return
    n = config.rollout.samples_per_prompt
    if a.group_baseline and a.advantage.kind != "function" and n < 2:
        yield config.problem(
            "rollout.samples_per_prompt",
            f"algorithm.advantage={a.advantage.kind} compares the samples of one prompt, and a group of one has nothing to compare",
            "set it to 2 or more, or take an estimator without groups (gae, reinforce_plus_plus)",
        )
    if filter.drop_zero_variance and n < 2:
        yield config.problem(
            "filter.drop_zero_variance",
            "a group of one never varies, so that every group would be dropped",
            "set it to false, or rollout.samples_per_prompt to 2 or more",
        )
    if filter.reward_band and filter.reward_band[0] > filter.reward_band[1]:
        yield Problem(
            "filter.reward_band",
            list(filter.reward_band),
            "no mean reward lies in it, so that every group would be dropped",
            "give the lowest mean reward first, then the highest",
        )
    if config.rollout.sampling.temperature == 0:
        yield config.problem(
            "rollout.sampling.temperature",
            "greedy samples of one prompt are identical, and their log-probabilities are no policy's",
            "set it above 0; evaluation.sets[].sampling has its own temperature",
        )
    if a.advantage.kind == "none" and a.distillation_coef == 0:
        yield config.problem(
            "algorithm.advantage",
            "without a reward's advantage and without a teacher there is nothing to learn",
            "choose an estimator, or set algorithm.distillation_coef and a teacher",
        )
    yield from _teacher(config)
    if a.overlong is not None:
        budget = config.rollout.longest_response
        if a.overlong.buffer_tokens is not None and a.overlong.buffer_tokens > budget:
            yield config.problem(
                "algorithm.overlong.buffer_tokens",
                f"the penalty would start before the response: {config.rollout.longest_response_field} is {budget}",
                f"set it to {budget} or less",
            )
        if a.advantage.kind == "max_rl":
            yield Problem(
                "algorithm.overlong",
                a.overlong.model_dump(),
                "max_rl divides by the group's mean reward, which a penalty can bring to 0 or below",
                "set it to null, or take another estimator",
            )


def _teacher(config: RunConfig) -> Iterator[Problem]:
    a, rollout, server = config.algorithm, config.rollout, config.algorithm.teacher_server
    if a.distillation_coef > 0 and a.teacher is None and server is None:
        yield config.problem(
            "algorithm.teacher",
            "algorithm.distillation_coef is above 0",
            "name the teacher's checkpoint folder, or the server that holds it in algorithm.teacher_server",
        )
    if a.teacher is not None and server is not None:
        yield config.problem(
            "algorithm.teacher", "algorithm.teacher_server names another teacher", "keep one of the two"
        )
    if (a.teacher is not None or server is not None) and a.distillation_coef == 0:
        yield config.problem(
            "algorithm.distillation_coef",
            "a teacher is named, but its log-probabilities have no weight",
            f"set it above 0, or leave algorithm.{'teacher' if a.teacher is not None else 'teacher_server'} out",
        )
    if server is None:
        return
    if rollout.sampling.temperature not in (0, 1):
        yield config.problem(
            "rollout.sampling.temperature",
            "a server gives the log-probabilities of a prompt at temperature 1, and the policy's are at this one",
            "set it to 1, or name the teacher's folder in algorithm.teacher",
        )
    if (server.model is None) != (server.protocol == "sglang"):
        yield config.problem(
            "algorithm.teacher_server.model",
            f"protocol={server.protocol} {'needs' if server.model is None else 'has no place for'} a model's name",
            "name it as the server does" if server.model is None else "leave it out",
        )
    if server.hint is not None and rollout.session is not None:
        yield Problem(
            "algorithm.teacher_server.hint",
            server.hint.function,
            "a rollout of several turns has no one prompt that the hint could be added to",
            "leave it out, or leave rollout.session out",
        )
    if server.top_k and server.protocol == "openai":
        yield config.problem(
            "algorithm.teacher_server.top_k",
            "protocol=openai shows tokens as text, and the loss needs their ids",
            "leave it out, or serve the teacher by SGLang or vLLM",
        )


def _loss(config: RunConfig) -> Iterator[Problem]:
    a, steps = config.algorithm, max(1, config.steps_per_iteration)
    loss, kind = a.loss, a.advantage.kind
    per_token = kind in TOKEN_LEVEL or a.distils_in_advantage or a.kl_placement == "reward"
    if loss.kind == "gspo" and kind != "function" and per_token:
        yield config.problem(
            "algorithm.loss",
            "its one ratio a sequence needs one advantage a sequence; algorithm.advantage, algorithm.teacher, algorithm.teacher_server or "
            "algorithm.kl_placement=reward gives one a token",
            "take loss=clipped, or a group estimator with kl_placement=loss",
        )
    if loss.kind == "reinforce" and steps > 1:
        yield config.problem(
            "algorithm.loss",
            f"it has no ratio, and from the second of {steps} steps an iteration the samples are not of the policy being trained",
            "leave trainer.global_batch and trainer.passes out (one step an iteration), or take loss=clipped",
        )
    if loss.kind == "clipped" and loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        yield config.problem(
            "algorithm.loss.dual_clip",
            f"it lies within the clip range, whose upper bound is {1 + loss.clip_high:g}",
            "set it above that (3 is usual)",
        )
    if loss.kind == "sapo" and min(loss.temperatures) <= 0:
        yield config.problem(
            "algorithm.loss.temperatures", "a gate needs a positive temperature", "use 1.0 and 1.05"
        )


def _kl(config: RunConfig) -> Iterator[Problem]:
    a = config.algorithm
    if a.kl_coef > 0:
        if a.supervised:
            yield config.problem("algorithm.kl_coef", "algorithm.loss=sft takes no KL term", "set it to 0")
        elif a.kl_placement == "reward" and a.advantage.kind not in (
            *TOKEN_LEVEL,
            "reinforce_plus_plus_baseline",
        ):
            yield config.problem(
                "algorithm.kl_placement",
                f"algorithm.advantage={a.advantage.kind} is fixed for the whole sample when its group is scored, before any log-probability of the reference",
                "set it to loss, or take gae, reinforce_plus_plus or reinforce_plus_plus_baseline",
            )
        elif a.kl_placement == "loss" and a.kl_kind == "k1" and not a.kl_unbiased:
            yield config.problem(
                "algorithm.kl_kind",
                "in the loss the expected gradient of k1 is zero: it would add noise and no pull to the reference",
                "take k2 or k3, set kl_unbiased, or kl_placement=reward",
            )
    elif a.kl_target is not None:
        yield config.problem(
            "algorithm.kl_coef",
            "algorithm.kl_target multiplies it, and 0 stays 0",
            "start it above 0, 0.05 for instance",
        )
    elif a.reference is not None:
        yield config.problem(
            "algorithm.reference", "without a KL term there is no reference", "set kl_coef, or leave it out"
        )
    elif a.reference_update_steps is not None:
        yield config.problem(
            "algorithm.reference_update_steps", "without a KL term there is no reference", "set kl_coef"
        )
    if a.kl_unbiased and a.kl_placement == "reward":
        yield config.problem(
            "algorithm.kl_unbiased",
            "in the reward the KL is a number about the sampled tokens, with no gradient to correct",
            "set it to false, or kl_placement=loss",
        )


def unweighed(config: RunConfig, cause: str) -> Iterator[Problem]:
    """Tokens of older weights that would be trained as if the current weights had sampled them, due to `cause`."""
    a = config.algorithm
    # then no such token is trained
    if a.correction.max_token_age == 0:
        return
    against_sampler = a.old_logprobs == "rollout" and a.loss.kind != "reinforce"
    if a.correction.kind == "none" and not against_sampler and a.loss.kind != "function":
        yield config.problem(
            "algorithm.correction.kind",
            f"{cause}, which would be trained as if the current ones had sampled them",
            "set it to truncate (TIS), mask or icepop; or take the ratio against the sampler by algorithm.old_logprobs=rollout",
        )


def _correction(config: RunConfig) -> Iterator[Problem]:
    a, c = config.algorithm, config.algorithm.correction
    if c.low > c.high:
        yield config.problem(
            "algorithm.correction.low", f"it is above correction.high, {c.high:g}", "exchange them"
        )
    active = c.kind != "none" or c.veto is not None
    if active and a.old_logprobs == "rollout":
        yield config.problem(
            "algorithm.old_logprobs",
            "the ratio is then taken against the engine's own log-probabilities, and every correction weight is 1",
            "set it to recompute or auto, or algorithm.correction.kind=none and leave algorithm.correction.veto out",
        )
    if c.kind == "icepop" and (c.level != "token" or c.low == 0):
        yield Problem(
            "algorithm.correction",
            c.model_dump(exclude={"veto", "opsm_delta", "max_token_age"}),
            "IcePop is a band on tokens with both bounds",
            "set level=token and low above 0 (0.5 and 5 are the paper's), or take kind=mask",
        )
    if c.kind == "mask" and c.level == "token" and c.low > 1:
        yield config.problem(
            "algorithm.correction.low", "weights of 1, which mean no gap, would be masked", "set it below 1"
        )
    if (active or c.opsm_delta is not None) and a.supervised:
        yield config.problem("algorithm.correction", "supervised rows were not sampled", "set kind=none")


def _max_token_age(config: RunConfig) -> Iterator[Problem]:
    a, p, buffer = config.algorithm, config.pipeline, config.rollout.buffer
    bound, field = a.correction.max_token_age, "algorithm.correction.max_token_age"
    if bound is None:
        return
    if a.supervised:
        yield Problem(field, bound, "supervised rows were not sampled", "leave it out")
        return
    if a.loss.kind == "gspo":
        yield Problem(
            field,
            bound,
            "algorithm.loss=gspo has one ratio a sequence, whose gradient reaches all its tokens, those left out too",
            "leave it out, or take loss=clipped",
        )
    # ages in published versions: one that all tokens of an iteration may have, and the largest of any
    reused = -(-buffer.max_age // max(1, config.steps_per_iteration)) if buffer is not None else 0
    whole, largest = p.oldest, max(p.staleness, reused)
    if bound >= largest:
        yield Problem(
            field,
            bound,
            f"no token is older than {largest} when it is trained, by pipeline.ahead, sync_every and max_staleness, and rollout.buffer, "
            "so that none would be left out",
            f"set it below {largest}, or leave it out" if largest else "leave it out",
        )
    if bound < whole:
        yield Problem(
            field,
            bound,
            f"by pipeline.ahead and pipeline.sync_every an iteration may be made by weights that are {whole} versions old, and would "
            "have no token to train on",
            f"set it to at least {whole}, or lower one of the two",
        )


def _truncated_sampling(config: RunConfig) -> Iterator[Problem]:
    """Truncated sampling together with ratios against the engine's log-probabilities.

    The engine's log-probabilities are of the full softmax at the sampling temperature. Under top-p, top-k or min-p tokens
    come from a renormalised part of it, so that a ratio against the full softmax is not a ratio of the sampled
    distribution.
    """
    a, c, sampling = config.algorithm, config.algorithm.correction, config.rollout.sampling
    against_engine = (
        c.kind != "none"
        or c.veto is not None
        or c.opsm_delta is not None
        or (a.old_logprobs == "rollout" and a.loss.kind in RATIO_LOSSES)
    )
    if not against_engine or a.supervised:
        return
    cut = {
        "top_p": (sampling.top_p < 1, 1),
        "top_k": (sampling.top_k > 0, -1),
        "min_p": (sampling.min_p > 0, 0),
    }
    for name, (on, off) in cut.items():
        if on:
            yield config.problem(
                f"rollout.sampling.{name}",
                "the engine's log-probabilities are of the whole vocabulary, so importance ratios against them are not those of truncated sampling",
                f"set it to {off}, or algorithm.correction.kind=none, without veto and opsm_delta, with algorithm.old_logprobs=recompute",
            )
