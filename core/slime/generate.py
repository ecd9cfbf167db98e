"""slime's custom generation as a rollout function: `async def generate(args, sample, sampling_params)`.

It asks SGLang's /generate at the address in `args`, which is this rollout's own. What is asked for goes on from tokens that
are known, exactly, or begins a branch; what is trained are the tokens that the engine gave. A sample that comes back with
others is refused, never repaired.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from millrace.core.rewards.reward_key import under_reward
from millrace.core.sessions.completions import SAMPLED, BadRequestError
from millrace.core.sessions.interface import Session, SessionError, Turn
from millrace.core.slime.sample import Arguments, Sample, SlimeStatus, provide, tokenizer

READ = ("text", "input_ids", "sampling_params", "return_logprob", "stream", "rid", "session_id")
OF_SAMPLING = ("max_new_tokens", "stop")
UNUSED = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "sampling_seed")


@dataclass
class _Line:
    """A branch, and all its tokens."""

    session: Session
    ids: list[int]
    mask: list[int]  # 1: generated in it


class SlimeRollout:
    """One rollout: its function, and what it asked the engine for."""

    def __init__(self, session: Session, given: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """given: `model`, the folder of its tokenizer, and `prompt_ids`."""
        prompt = list(given["prompt_ids"])
        self._session, self._sampling, self._model = session, dict(sampling), str(given["model"])
        self._lines = [_Line(session, prompt, [0] * len(prompt))]
        self._prompt_ids = prompt
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def make(self, function: Callable[..., Awaitable[Any]], options: Mapping[str, Any]) -> None:
        """Call the function, and give its rewards to the branches that it made."""
        provide()
        task, plain = self._session.task, self._sampling
        place = urlsplit(self._session.base_url)
        params = {key: plain[key] for key in (*SAMPLED, *OF_SAMPLING) if plain.get(key) is not None}
        args = Arguments(
            hf_checkpoint=self._model,
            sglang_router_ip=f"session:{quote(self._session.api_key)}@{place.hostname}",
            sglang_router_port=place.port,
            sampling_params=params,
            rollout_max_response_len=plain["max_new_tokens"],
            rollout_temperature=plain["temperature"],
            rollout_top_p=plain["top_p"],
            rollout_top_k=plain["top_k"],
            partial_rollout=False,
            **options,
        )
        sample = Sample(
            index=task.index,
            prompt=tokenizer(self._model).decode(self._prompt_ids),
            label=task.label,
            metadata=dict(task.metadata),
        )
        more = {"evaluation": task.evaluation} if _takes_evaluation(function) else {}
        made = await function(args, sample, params, **more)
        samples = made if isinstance(made, list) else [made]
        for each in samples:
            self._take(each, options.get("reward_key"))

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request as SGLang's /generate does. An equal one gets the answer of the first.

        Raises BadRequestError, and what the session raises.
        """
        key = json.dumps(body, sort_keys=True)
        known = self._asked.get(key)
        if known is None:
            known = self._asked[key] = asyncio.ensure_future(self._complete(body))
        try:
            return await asyncio.shield(known)
        except asyncio.CancelledError:  # the rollout has ended: a client that hangs up cancels nothing here
            known.cancel()
            raise

    async def _complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        ids, limit, stop = self._read(body)
        line, new = self._line(ids)
        turn = await line.session.generate(new or None, max_new_tokens=limit, stop=stop, logprobs=True)
        line.ids = [*ids, *turn.output_ids]
        line.mask += [0] * len(new) + [1] * len(turn.output_ids)
        return _answer(turn)

    def _line(self, ids: list[int]) -> tuple[_Line, list[int]]:
        """The branch that goes on, with its new tokens."""
        known = [line for line in self._lines if ids[: len(line.ids)] == line.ids]
        if known:
            line = max(known, key=lambda line: len(line.ids))
            new = ids[len(line.ids) :]
            # until its turn is there, no other request goes on from it
            line.ids = [*ids, -1]
            return line, new
        line = _Line(self._session.branch(prompt=ids), [*ids, -1], [0] * len(ids))
        self._lines.append(line)
        return line, []

    def _read(self, body: Mapping[str, Any]) -> tuple[list[int], int | None, list[str]]:
        for key in body.keys() - set(READ):
            raise BadRequestError(key, "it is not known here")
        if body.get("stream"):
            raise BadRequestError("stream", "answers come whole")
        params = body.get("sampling_params") or {}
        for key, value in params.items():
            if key in SAMPLED:
                if value != self._sampling[key]:
                    raise BadRequestError(
                        f"sampling_params.{key}",
                        f"it is {value!r}, the run samples with {self._sampling[key]!r}: set rollout.sampling.{key}"
                        " in a branch or a new run",
                    )
            elif key not in (*OF_SAMPLING, *UNUSED) and value not in (
                None,
                [],
                {},
                "",
                self._sampling.get(key),
            ):
                raise BadRequestError(f"sampling_params.{key}", "it is not known here")
        stop = params.get("stop") or []
        return self._ids(body), params.get("max_new_tokens"), [stop] if isinstance(stop, str) else list(stop)

    def _ids(self, body: Mapping[str, Any]) -> list[int]:
        given, text = body.get("input_ids"), body.get("text")
        if isinstance(given, list) and all(isinstance(item, int) for item in given) and given:
            return list(given)
        if not isinstance(text, str) or not text:
            raise BadRequestError("input_ids", "a list of token ids is wanted, or text")
        tokens = tokenizer(self._model)
        for line in sorted(self._lines, key=lambda line: -len(line.ids)):
            said = tokens.decode([token for token in line.ids if token >= 0])
            if text.startswith(said):  # what is known stays as it was generated
                return [*line.ids, *tokens(text[len(said) :], add_special_tokens=False)["input_ids"]]
        found: list[int] = tokens(text, add_special_tokens=False)["input_ids"]
        return found

    def _take(self, sample: Any, reward_key: str | None) -> None:
        """A sample that came back. Raises SessionError for one that is not what was generated."""
        status = getattr(sample.status, "value", sample.status)
        if status in (SlimeStatus.ABORTED.value, SlimeStatus.FAILED.value):
            raise SessionError(f"the function returned a sample that is {status}")
        if sample.remove_sample:
            raise SessionError(
                "sample.remove_sample: a rollout whose samples are not to be trained has to raise"
            )
        line = self._line_of(sample.tokens)
        _check_mask(sample, line)
        reward = sample.reward
        if isinstance(reward, Mapping):
            key = reward_key or "reward"
            if key not in reward:
                raise SessionError(
                    f"sample.reward has no {key}: name its key in the function's options as reward_key"
                )
            given = under_reward(reward, key)
            line.session.reward(given.pop("reward"), **given)
        elif reward is not None:
            line.session.reward(reward)

    def _line_of(self, tokens: Sequence[int]) -> _Line:
        """The branch whose tokens these are; what was added after its last turn does not count."""
        if not tokens:
            return self._lines[0]
        found = [line for line in self._lines if line.ids == list(tokens[: len(line.ids)])]
        if found:
            return max(found, key=lambda line: len(line.ids))
        ids, length = self._lines[0].ids, min(len(self._lines[0].ids), len(tokens))
        at = next((i for i in range(length) if ids[i] != tokens[i]), length)
        raise SessionError(
            f"sample.tokens are not those that were sent and generated: they differ from token {at} on (of {len(ids)}). "
            "Append output_ids of the answer as they are; ask with input_ids"
        )


def _takes_evaluation(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == "evaluation" or each.kind is each.VAR_KEYWORD for each in parameters)


def _check_mask(sample: Any, line: _Line) -> None:
    if sample.loss_mask is None:
        return
    first = len(sample.tokens) - len(sample.loss_mask)
    mask = [*line.mask, *[0] * (len(sample.tokens) - len(line.mask))]
    for at, given in enumerate(sample.loss_mask, first):
        if bool(given) != bool(mask[at]):
            said = "masks a token that was generated" if mask[at] else "trains a token that was not generated"
            raise SessionError(f"sample.loss_mask {said} (token {at} of {len(mask)})")


def _answer(turn: Turn) -> dict[str, Any]:
    ended: dict[str, Any] = (
        {"type": "length", "length": len(turn.output_ids)}
        if turn.truncated
        else {"type": "stop", "matched": None}
    )
    return {
        "text": turn.text,
        "output_ids": list(turn.output_ids),
        "meta_info": {
            "finish_reason": ended,
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": len(turn.output_ids),
            "cached_tokens": 0,
            "output_token_logprobs": [
                [value, token, None] for value, token in zip(turn.logprobs, turn.output_ids, strict=True)
            ],
        },
    }
