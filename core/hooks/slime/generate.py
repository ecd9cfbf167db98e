"""slime's custom generation as a rollout function: `async def generate(args, sample, sampling_params)`.

It asks SGLang's /generate at the address in `args`, which is this rollout's own. A request continues
known tokens exactly, or starts a branch. Generated tokens are trained, unless a returned sample leaves them out: by its
loss_mask, by remove_sample, or by ending before them. A sample with other tokens is refused, never repaired.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.core.hooks.slime.arguments import address_arguments, sampling_arguments
from millrace.core.hooks.slime.names import provide
from millrace.core.hooks.slime.reward import under_reward
from millrace.core.hooks.slime.sample import Arguments, Sample, SlimeStatus, tokenizer
from millrace.core.sessions.completions import SAMPLED, BadRequestError, length
from millrace.core.sessions.interface import SessionError, Turn
from millrace.core.sessions.live import LiveSession
from millrace.core.sessions.pipe import SlimeStart

READ = ("text", "input_ids", "sampling_params", "return_logprob", "stream", "rid", "session_id")
OF_SAMPLING = ("max_new_tokens", "stop")
LARGEST_ID = 2**31 - 1
UNUSED = ("skip_special_tokens", "no_stop_trim", "spaces_between_special_tokens", "sampling_seed")


class Form(NamedTuple):
    """The parameters of a generation besides args."""

    listed: bool  # gets and returns a list of samples, here of one sample
    sampling: bool  # it gets sampling_params
    evaluation: bool

    @property
    def arguments(self) -> list[str]:
        """The names of positional parameters."""
        return [
            "args",
            "samples" if self.listed else "sample",
            *(["sampling_params"] if self.sampling else []),
        ]


def form_of(function: Callable[..., Any]) -> Form:
    """The form of a generation, by its parameters: (args, sample, sampling_params) or (args, samples), each with evaluation."""
    parameters = list(inspect.signature(function).parameters.values())
    names = [each.name for each in parameters]
    listed = names[1:2] == ["samples"]
    evaluation = "evaluation" in names or any(each.kind is each.VAR_KEYWORD for each in parameters)
    return Form(listed, not listed or any("sampling" in name for name in names[2:]), evaluation)


def read_ends(params: Any) -> tuple[int | None, list[str]]:
    """The longest answer and its stops, from a request's sampling_params. Raises BadRequestError."""
    if not isinstance(params, Mapping):
        raise BadRequestError("sampling_params", "an object is wanted")
    longest, stop = params.get("max_new_tokens"), params.get("stop") or []
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError("sampling_params.stop", "text or a list of texts is wanted")
    return None if longest is None else length("sampling_params.max_new_tokens", longest), list(texts)


def read_ids(given: Any) -> list[int]:
    """Token ids of a request. Raises BadRequestError."""
    if not isinstance(given, list) or not all(
        type(token) is int and 0 <= token <= LARGEST_ID for token in given
    ):
        raise BadRequestError("input_ids", "a list of token ids is wanted, or text")
    return list(given)


@dataclass
class _Line:
    """A branch, and all its tokens."""

    session: LiveSession
    ids: list[int]
    mask: list[int]  # 1: generated in it
    # positions of tokens in the loss, once a returned sample holds the branch
    trained: set[int] | None = None


class SlimeRollout:
    """One rollout: its function, and its requests to the engine."""

    def __init__(self, session: LiveSession, start: SlimeStart, sampling: Mapping[str, Any]) -> None:
        """start: its arguments name the tokenizer's folder as hf_checkpoint."""
        prompt = list(start.prompt_ids)
        self._session, self._sampling, self._arguments = session, dict(sampling), dict(start.arguments)
        self._model = str(self._arguments["hf_checkpoint"])
        self._lines = [_Line(session, prompt, [0] * len(prompt))]
        self._prompt_ids = prompt
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._rewards: list[float] = []

    async def make(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Call the function, and set the rewards of its branches and the tokens that they leave out of the loss."""
        provide()
        task, plain, form = self._session.task, self._sampling, form_of(function)
        params = {key: plain[key] for key in (*SAMPLED, *OF_SAMPLING) if plain.get(key) is not None}
        given = {
            **self._arguments,
            **sampling_arguments(plain, params),
            **address_arguments(self._session.base_url, self._session.api_key),
            **options,
        }
        args = Arguments(**given)
        sample = Sample(
            index=task.index,
            group_index=0,
            rollout_id=task.index,
            session_id=self._session.api_key[:16],
            prompt=tokenizer(self._model).decode(self._prompt_ids),
            label=task.label,
            metadata=dict(task.metadata),
        )
        named = {"evaluation": task.evaluation} if form.evaluation else {}
        by_place = [*([params] if form.sampling else [])]
        made = function(args, [sample] if form.listed else sample, *by_place, **named)
        samples = list(_flat(await made if inspect.isawaitable(made) else made))
        if not samples:
            raise SessionError("the function returned no sample")
        for each in samples:
            self._take(each, given.get("reward_key"))
        self._leave_out()

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request as SGLang's /generate does. An equal request gets the first one's answer.

        Raises BadRequestError, and errors of the session.
        """
        key = json.dumps(body, sort_keys=True)
        known = self._asked.get(key)
        if known is None:
            known = self._asked[key] = asyncio.ensure_future(self._complete(body))
        try:
            return await asyncio.shield(known)
        # the rollout has ended: a client that disconnects does not cancel this
        except asyncio.CancelledError:
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
        """The branch to continue, with its new tokens."""
        known = [line for line in self._lines if ids[: len(line.ids)] == line.ids]
        if known:
            line = max(known, key=lambda line: len(line.ids))
            new = ids[len(line.ids) :]
            # until its turn is generated, no other request continues the branch
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
        limit, stop = read_ends(params)
        for key, value in params.items():
            if key in (*OF_SAMPLING, *UNUSED):
                continue
            own = self._sampling.get(key)
            if key in self._sampling and (value or own) and value != own:
                raise BadRequestError(
                    f"sampling_params.{key}",
                    f"it is {value!r}, the run samples with {own!r}: set rollout.sampling.{key} in a branch or a new run",
                )
            if key not in self._sampling and value not in (None, [], {}, ""):
                raise BadRequestError(f"sampling_params.{key}", "it is not known here")
        return self._ids(body), limit, stop

    def _ids(self, body: Mapping[str, Any]) -> list[int]:
        given, text = body.get("input_ids"), body.get("text")
        if given:
            return read_ids(given)
        if not isinstance(text, str) or not text:
            raise BadRequestError("input_ids", "a list of token ids is wanted, or text")
        tokens = tokenizer(self._model)
        for line in sorted(self._lines, key=lambda line: -len(line.ids)):
            said = tokens.decode([token for token in line.ids if token >= 0])
            # known tokens stay as they were generated
            if text.startswith(said):
                return [*line.ids, *tokens(text[len(said) :], add_special_tokens=False)["input_ids"]]
        found: list[int] = tokens(text, add_special_tokens=False)["input_ids"]
        return found

    def _take(self, sample: Any, reward_key: str | None) -> None:
        """Take a returned sample. Raises SessionError if it is not what was generated."""
        status = getattr(sample.status, "value", sample.status)
        if status in (SlimeStatus.ABORTED.value, SlimeStatus.FAILED.value):
            raise SessionError(f"the function returned a sample that is {status}")
        line = self._line_of(sample)
        line.trained = (line.trained or set()) | set(_trained(sample, line))
        if status == SlimeStatus.TRUNCATED.value:
            line.session.cut()
        reward = sample.reward
        if isinstance(reward, Mapping):
            key = reward_key or "reward"
            if key not in reward:
                raise SessionError(
                    f"sample.reward has no {key}: name its key in the function's options as reward_key"
                )
            given = under_reward(reward, key)
            self._rewards.append(given["reward"])
            line.session.reward(given.pop("reward"), **given)
        elif reward is not None:
            self._rewards.append(reward)
            line.session.reward(reward)

    def _leave_out(self) -> None:
        """Leave generated tokens that no returned sample trains out of the loss. Its branch gets the mean reward."""
        for line in self._lines:
            if line.trained is None and self._rewards:
                line.session.reward(sum(self._rewards) / len(self._rewards))
            trained = line.trained or set()
            line.session.leave_out([at for at, mask in enumerate(line.mask) if mask and at not in trained])

    def _line_of(self, sample: Any) -> _Line:
        """The branch whose tokens a sample holds, all of them or the first ones; tokens after its last turn do not count."""
        tokens = list(sample.tokens)
        if not tokens:
            return self._lines[0]
        whole = [line for line in self._lines if line.ids == tokens[: len(line.ids)]]
        if whole:
            return max(whole, key=lambda line: len(line.ids))
        cut = [line for line in self._lines if line.ids[: len(tokens)] == tokens]
        if cut:
            return min(cut, key=lambda line: len(line.ids))
        if sample.remove_sample:
            return self._lines[0]
        ids, length = self._lines[0].ids, min(len(self._lines[0].ids), len(tokens))
        at = next((i for i in range(length) if ids[i] != tokens[i]), length)
        raise SessionError(
            f"sample.tokens are not those that were sent and generated: they differ from token {at} on (of {len(ids)}). "
            "Append output_ids of the answer as they are; ask with input_ids"
        )


def _flat(made: Any) -> Iterator[Any]:
    """The samples that a function returned. Raises SessionError for other values."""
    if isinstance(made, list | tuple):
        for each in made:
            yield from _flat(each)
    elif isinstance(made, Sample):
        yield made
    else:
        raise SessionError(
            f"the function returned a {type(made).__name__}: return the sample, or a list of samples"
        )


def _trained(sample: Any, line: _Line) -> Iterator[int]:
    """Positions of the generated tokens that a sample trains. Raises SessionError for a mask that trains others."""
    if sample.remove_sample:
        return
    count = len(sample.tokens)
    if sample.loss_mask is None or not (count or sample.loss_mask):
        first = count - sample.response_length if sample.response_length else 0
        yield from (at for at, mask in enumerate(line.mask) if mask and (not count or first <= at < count))
        return
    if count and len(sample.loss_mask) != sample.response_length:
        raise SessionError(
            f"sample.loss_mask has {len(sample.loss_mask)} values, sample.response_length is {sample.response_length}"
        )
    first = (count or len(line.ids)) - len(sample.loss_mask)
    for at, given in enumerate(sample.loss_mask, first):
        generated = 0 <= at < len(line.mask) and line.mask[at]
        if given and not generated:
            raise SessionError(
                f"sample.loss_mask trains a token that was not generated (token {at} of {len(line.mask)})"
            )
        if given:
            yield at


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
