"""Rules of `algorithm`: combinations that make no sense, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from millrace.core.config.algorithm import Algorithm
from millrace.core.config.filter import Filter
from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import Rollout, Sampling

TOKEN_LEVEL = ("gae", "reinforce_plus_plus")
RATIO_LOSSES = ("clipped", "gspo", "cispo", "sapo", "function")


def problems(
    algorithm: Algorithm,
    rollout: Rollout,
    *,
    filter: Filter | None = None,
    steps_per_iteration: int = 1,
    ages: tuple[int, int] | None = None,
) -> list[Problem]:
    """Everything wrong with the section, all at once; empty when it makes sense.

    steps_per_iteration: optimizer steps on one iteration's samples.
    ages: the age that all tokens of an iteration may have, and the largest of any, in published versions; None: not known.
    """
    return [
        *_estimator(algorithm, rollout, filter),
        *_loss(algorithm, steps_per_iteration),
        *_kl(algorithm),
        *_correction(algorithm),
        *_max_token_age(algorithm, ages),
        *truncated_sampling(algorithm, rollout.sampling),
    ]


def _estimator(a: Algorithm, rollout: Rollout, filter: Filter | None) -> Iterator[Problem]:
    if a.supervised:
        return
    n = rollout.samples_per_prompt
    if a.group_baseline and a.advantage.kind != "function" and n < 2:
        yield Problem(
            "rollout.samples_per_prompt",
            n,
            f"algorithm.advantage={a.advantage.kind} compares the samples of one prompt, and a group of one has nothing to compare",
            "set it to 2 or more, or take an estimator without groups (gae, reinforce_plus_plus)",
        )
    if filter is not None and filter.drop_zero_variance and n < 2:
        yield Problem(
            "filter.drop_zero_variance",
            True,
            "a group of one never varies, so that every group would be dropped",
            "set it to false, or rollout.samples_per_prompt to 2 or more",
        )
    if filter is not None and filter.reward_band and filter.reward_band[0] > filter.reward_band[1]:
        yield Problem(
            "filter.reward_band",
            list(filter.reward_band),
            "no mean reward lies in it, so that every group would be dropped",
            "give the lowest mean reward first, then the highest",
        )
    if rollout.sampling.temperature == 0:
        yield Problem(
            "rollout.sampling.temperature",
            0,
            "greedy samples of one prompt are identical, and their log-probabilities are no policy's",
            "set it above 0; evaluation.sets[].sampling has its own temperature",
        )
    if a.advantage.kind == "none" and a.distillation_coef == 0:
        yield Problem(
            "algorithm.advantage",
            "none",
            "without a reward's advantage and without a teacher there is nothing to learn",
            "choose an estimator, or set algorithm.distillation_coef and a teacher",
        )
    yield from _teacher(a, rollout)
    if a.overlong is not None:
        budget = rollout.longest_response
        if a.overlong.buffer_tokens is not None and a.overlong.buffer_tokens > budget:
            yield Problem(
                "algorithm.overlong.buffer_tokens",
                a.overlong.buffer_tokens,
                f"the penalty would start before the response: {rollout.longest_response_field} is {budget}",
                f"set it to {budget} or less",
            )
        if a.advantage.kind == "max_rl":
            yield Problem(
                "algorithm.overlong",
                a.overlong.model_dump(),
                "max_rl divides by the group's mean reward, which a penalty can bring to 0 or below",
                "set it to null, or take another estimator",
            )


def _teacher(a: Algorithm, rollout: Rollout) -> Iterator[Problem]:
    server = a.teacher_server
    if a.distillation_coef > 0 and a.teacher is None and server is None:
        yield Problem(
            "algorithm.teacher",
            None,
            "algorithm.distillation_coef is above 0",
            "name the teacher's checkpoint folder, or the server that holds it in algorithm.teacher_server",
        )
    if a.teacher is not None and server is not None:
        yield Problem(
            "algorithm.teacher",
            a.teacher,
            "algorithm.teacher_server names another teacher",
            "keep one of the two",
        )
    if (a.teacher is not None or server is not None) and a.distillation_coef == 0:
        yield Problem(
            "algorithm.distillation_coef",
            0,
            "a teacher is named, but its log-probabilities have no weight",
            f"set it above 0, or leave algorithm.{'teacher' if a.teacher is not None else 'teacher_server'} out",
        )
    if server is None:
        return
    if rollout.sampling.temperature not in (0, 1):
        yield Problem(
            "rollout.sampling.temperature",
            rollout.sampling.temperature,
            "a server gives the log-probabilities of a prompt at temperature 1, and the policy's are at this one",
            "set it to 1, or name the teacher's folder in algorithm.teacher",
        )
    if (server.model is None) != (server.protocol == "sglang"):
        yield Problem(
            "algorithm.teacher_server.model",
            server.model,
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
        yield Problem(
            "algorithm.teacher_server.top_k",
            server.top_k,
            "protocol=openai shows tokens as text, and the loss needs their ids",
            "leave it out, or serve the teacher by SGLang or vLLM",
        )


def _loss(a: Algorithm, steps: int) -> Iterator[Problem]:
    loss, kind = a.loss, a.advantage.kind
    per_token = kind in TOKEN_LEVEL or a.distils_in_advantage or a.kl_placement == "reward"
    if loss.kind == "gspo" and kind != "function" and per_token:
        yield Problem(
            "algorithm.loss",
            "gspo",
            "its one ratio a sequence needs one advantage a sequence; algorithm.advantage, algorithm.teacher, algorithm.teacher_server or "
            "algorithm.kl_placement=reward gives one a token",
            "take loss=clipped, or a group estimator with kl_placement=loss",
        )
    if loss.kind == "reinforce" and steps > 1:
        yield Problem(
            "algorithm.loss",
            "reinforce",
            f"it has no ratio, and from the second of {steps} steps an iteration the samples are not of the policy being trained",
            "leave trainer.global_batch and trainer.passes out (one step an iteration), or take loss=clipped",
        )
    if loss.kind == "clipped" and loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        yield Problem(
            "algorithm.loss.dual_clip",
            loss.dual_clip,
            f"it lies within the clip range, whose upper bound is {1 + loss.clip_high:g}",
            "set it above that (3 is usual)",
        )
    if loss.kind == "sapo" and min(loss.temperatures) <= 0:
        yield Problem(
            "algorithm.loss.temperatures",
            loss.temperatures,
            "a gate needs a positive temperature",
            "use 1.0 and 1.05",
        )


def _kl(a: Algorithm) -> Iterator[Problem]:
    if a.kl_coef > 0:
        if a.supervised:
            yield Problem(
                "algorithm.kl_coef", a.kl_coef, "algorithm.loss=sft takes no KL term", "set it to 0"
            )
        elif a.kl_placement == "reward" and a.advantage.kind not in (
            *TOKEN_LEVEL,
            "reinforce_plus_plus_baseline",
        ):
            yield Problem(
                "algorithm.kl_placement",
                "reward",
                f"algorithm.advantage={a.advantage.kind} is fixed for the whole sample when its group is scored, before any log-probability of the reference",
                "set it to loss, or take gae, reinforce_plus_plus or reinforce_plus_plus_baseline",
            )
        elif a.kl_placement == "loss" and a.kl_kind == "k1" and not a.kl_unbiased:
            yield Problem(
                "algorithm.kl_kind",
                "k1",
                "in the loss the expected gradient of k1 is zero: it would add noise and no pull to the reference",
                "take k2 or k3, set kl_unbiased, or kl_placement=reward",
            )
    elif a.kl_target is not None:
        yield Problem(
            "algorithm.kl_coef",
            0,
            "algorithm.kl_target multiplies it, and 0 stays 0",
            "start it above 0, 0.05 for instance",
        )
    elif a.reference is not None:
        yield Problem(
            "algorithm.reference",
            a.reference,
            "without a KL term there is no reference",
            "set kl_coef, or leave it out",
        )
    elif a.reference_update_steps is not None:
        yield Problem(
            "algorithm.reference_update_steps",
            a.reference_update_steps,
            "without a KL term there is no reference",
            "set kl_coef",
        )
    if a.kl_unbiased and a.kl_placement == "reward":
        yield Problem(
            "algorithm.kl_unbiased",
            True,
            "in the reward the KL is a number about the sampled tokens, with no gradient to correct",
            "set it to false, or kl_placement=loss",
        )


def unweighed(a: Algorithm, cause: str) -> Iterator[Problem]:
    """Tokens of older weights that would be trained as if the current weights had sampled them, due to `cause`."""
    # then no such token is trained
    if a.correction.max_token_age == 0:
        return
    against_sampler = a.old_logprobs == "rollout" and a.loss.kind != "reinforce"
    if a.correction.kind == "none" and not against_sampler and a.loss.kind != "function":
        yield Problem(
            "algorithm.correction.kind",
            "none",
            f"{cause}, which would be trained as if the current ones had sampled them",
            "set it to truncate (TIS), mask or icepop; or take the ratio against the sampler by algorithm.old_logprobs=rollout",
        )


def _correction(a: Algorithm) -> Iterator[Problem]:
    c = a.correction
    if c.low > c.high:
        yield Problem(
            "algorithm.correction.low", c.low, f"it is above correction.high, {c.high:g}", "exchange them"
        )
    active = c.kind != "none" or c.veto is not None
    if active and a.old_logprobs == "rollout":
        yield Problem(
            "algorithm.old_logprobs",
            "rollout",
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
        yield Problem(
            "algorithm.correction.low",
            c.low,
            "weights of 1, which mean no gap, would be masked",
            "set it below 1",
        )
    if (active or c.opsm_delta is not None) and a.supervised:
        yield Problem("algorithm.correction", c.kind, "supervised rows were not sampled", "set kind=none")


def _max_token_age(a: Algorithm, ages: tuple[int, int] | None) -> Iterator[Problem]:
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
    if ages is None:
        return
    whole, largest = ages
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


def truncated_sampling(algorithm: Algorithm, sampling: Sampling) -> list[Problem]:
    """Truncated sampling together with ratios against the engine's log-probabilities.

    The engine's log-probabilities are of the full softmax at the sampling temperature. Under top-p, top-k or min-p tokens
    come from a renormalised part of it, so that a ratio against the full softmax is not a ratio of the sampled
    distribution.
    """
    c = algorithm.correction
    against_engine = (
        c.kind != "none"
        or c.veto is not None
        or c.opsm_delta is not None
        or (algorithm.old_logprobs == "rollout" and algorithm.loss.kind in RATIO_LOSSES)
    )
    if not against_engine or algorithm.supervised:
        return []
    cut = {
        "top_p": (sampling.top_p, sampling.top_p < 1, 1),
        "top_k": (sampling.top_k, sampling.top_k > 0, -1),
        "min_p": (sampling.min_p, sampling.min_p > 0, 0),
    }
    return [
        Problem(
            f"rollout.sampling.{name}",
            value,
            "the engine's log-probabilities are of the whole vocabulary, so importance ratios against them are not those of truncated sampling",
            f"set it to {off}, or algorithm.correction.kind=none, without veto and opsm_delta, with algorithm.old_logprobs=recompute",
        )
        for name, (value, on, off) in cut.items()
        if on
    ]
