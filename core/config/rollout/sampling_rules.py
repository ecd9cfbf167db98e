"""Rules of `rollout.sampling` and of the samplings of `evaluation`.

Which fields training allows: an engine's log-probability is log_softmax(logits / temperature), after penalties, bias,
least length and grammar have changed the logits, and before top-k, top-p and min-p cut the distribution.

    stops, ignore_eos, skip_special_tokens   the distribution is the policy's
    top_k, top_p, min_p                      the log-probability is the policy's, not of the distribution drawn from:
                                             `millrace.core.config.algorithm.rules`
    Sampling.reshaping                       the log-probability is of the distribution drawn from, not the policy's:
                                             trainer and engine cannot be compared, so rollouts that train refuse it
"""

import re
from collections.abc import Iterator

from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import Sampling
from millrace.core.config.run_config import RunConfig

APPROXIMATE = ("min_new_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty")
UNROUTED = ("stop_regex", "logit_bias")


def problems(config: RunConfig) -> Iterator[Problem]:
    """Sampling parameters that yield nothing, that the engines lack, or that training does not allow."""
    for place, sampling in config.samplings:
        yield from _contents(place, sampling)
        yield from _engines(config, place, sampling)
        yield from _sessions(config, place, sampling)
    yield from _training(config)


def _contents(place: str, sampling: Sampling) -> Iterator[Problem]:
    if "" in sampling.stop:
        yield Problem(
            f"{place}.stop",
            sampling.stop,
            "an empty string ends every response at once",
            "remove it from the list",
        )
    if any(token < 0 for token in sampling.stop_token_ids):
        yield Problem(
            f"{place}.stop_token_ids", sampling.stop_token_ids, "no token has a negative id", "remove it"
        )
    if any(token < 0 for token in sampling.logit_bias):
        yield Problem(f"{place}.logit_bias", sampling.logit_bias, "no token has a negative id", "remove it")
    if sampling.top_k == 0:
        yield Problem(
            f"{place}.top_k", 0, "no token would be left to sample", "set it to -1 for the whole vocabulary"
        )
    for pattern in sampling.stop_regex:
        reason = _wrong_pattern(pattern)
        if reason:
            yield Problem(f"{place}.stop_regex", pattern, reason, "correct it, or remove it")
    if sampling.min_new_tokens > sampling.max_new_tokens:
        yield Problem(
            f"{place}.min_new_tokens",
            sampling.min_new_tokens,
            f"no response is longer than max_new_tokens = {sampling.max_new_tokens}",
            f"set it to {sampling.max_new_tokens} or less",
        )
    if len(sampling.grammar) > 1:
        first, second, *_ = sampling.grammar
        yield Problem(
            f"{place}.{second}",
            sampling.grammar[second],
            f"{first} sets the form already",
            "keep one of the two",
        )


def _wrong_pattern(pattern: str) -> str | None:
    try:
        empty = re.compile(pattern).search("")
    except re.error as error:
        return f"not a regular expression: {error}"
    return "it is found in the empty text, so that every response ends at once" if empty else None


def _engines(config: RunConfig, place: str, sampling: Sampling) -> Iterator[Problem]:
    engines = config.engines
    for name, value in sampling.grammar.items():
        if not any(kind.has_grammar for kind in engines.kinds):
            yield Problem(
                f"{place}.{name}",
                value,
                f"{engines.kind} engines have no grammar backend",
                "leave it out, or set engines.kind=sglang",
            )
        elif engines.sglang.get("grammar_backend") == "none":
            yield Problem(
                f"{place}.{name}",
                value,
                "engines.sglang.grammar_backend is none",
                "leave it out, or set engines.sglang.grammar_backend=xgrammar",
            )
    for name in UNROUTED:
        if engines.router is not None and name in sampling.given:
            yield Problem(
                f"{place}.{name}",
                sampling.given[name],
                "sglang-router drops it",
                "leave it out, or leave engines.router out",
            )
    for name in APPROXIMATE:
        if engines.sglang.get("speculative_algorithm") is not None and name in sampling.given:
            yield Problem(
                f"{place}.{name}",
                sampling.given[name],
                "SGLang's speculative decoding counts it for several tokens at once",
                "leave it out, or leave speculative decoding out",
            )


def _sessions(config: RunConfig, place: str, sampling: Sampling) -> Iterator[Problem]:
    """Sampling fields that a rollout of several turns does not support."""
    if config.rollout.session is None:
        return
    if sampling.ignore_eos:
        yield Problem(
            f"{place}.ignore_eos",
            True,
            "with rollout.session a turn ends at the end-of-sequence token",
            "set it to false",
        )
    if not sampling.skip_special_tokens:
        yield Problem(
            f"{place}.skip_special_tokens",
            False,
            "with rollout.session a turn's text is parsed from its tokens",
            "set it to true; functions of a session get the token ids",
        )


def _training(config: RunConfig) -> Iterator[Problem]:
    if config.algorithm.supervised:
        return
    for name, value in config.rollout.sampling.reshaping.items():
        yield Problem(
            f"rollout.sampling.{name}",
            value,
            "tokens would be drawn from another distribution than the policy's, and its log-probabilities would not be the trainer's",
            f"leave it out; evaluation.sets[].sampling.{name} is allowed",
        )
