"""OpenAI's chat completions over turns: reads a request, and writes a turn as the answer. Pure.

Owns what is accepted. Fields that would make the policy sample differently from the run are refused with the field to set
instead: training relies on one way of sampling. Knows nothing of HTTP or of how turns are made.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.contracts.rows.messages import ROLES, NotTextError, message_of
from millrace.core.plain_text import json_text, whole_values
from millrace.core.sessions.history import TurnKey
from millrace.core.sessions.interface import Message, Turn

LONGEST = 2**31 - 1  # tokens that a request may ask for; the run's own limits are lower
MODEL = "policy"  # the only model; requests may use any name
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
# fields that change logits, and the value that changes nothing
RESHAPING: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "logit_bias": {},
}
# fields that may be absent, null or this value, which holds in any case
FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "store": (False,),
}
UNUSED = ("model", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
READ = ("messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options")


class BadRequestError(Exception):
    """A request that is refused, with the field and the reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


@dataclass(frozen=True)
class ChatRequest:
    """A request as it was read."""

    messages: Sequence[Message]  # in the form that a chat template takes
    max_tokens: int | None
    stop: Sequence[str]
    stream: bool
    usage: bool  # whether usage is reported at the end of a stream
    model: str


def read_request(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any]
) -> ChatRequest:
    """Read a request's body. tools: schemas of the configured ones. sampling: the run's. Raises BadRequestError."""
    for key, value in body.items():
        if value is None or key in READ or key in UNUSED:
            continue
        if key in SAMPLED:
            if not _equal(value, sampling[key]):
                raise BadRequestError(
                    key,
                    f"it is {value!r}, the run samples with {sampling[key]!r}. Leave it out, or set rollout.sampling.{key}"
                    " in a branch or a new run (of an evaluation: its set's sampling): other samples would be off policy",
                )
        elif key in RESHAPING:
            own = sampling.get(key, RESHAPING[key])
            if not _equal(value, own):
                raise BadRequestError(key, f"it can only be {own!r} here, not {value!r}")
        elif key not in FIXED:
            raise BadRequestError(key, "it is not known here")
        elif not any(_equal(value, allowed) for allowed in FIXED[key]):
            raise BadRequestError(key, f"it can only be {FIXED[key][0]!r} here, not {value!r}")
    _check_tools(body.get("tools"), tools)
    stream, options = body.get("stream") or False, body.get("stream_options") or {}
    if not isinstance(stream, bool) or not isinstance(options, Mapping):
        raise BadRequestError("stream", "a boolean is wanted, and an object as stream_options")
    return ChatRequest(
        messages=read_messages(body.get("messages")),
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        stream=stream,
        usage=bool(options.get("include_usage")),
        model=str(body.get("model") or MODEL),
    )


def read_messages(given: Any) -> list[Message]:
    """Messages with text as content and calls with arguments as objects. Raises BadRequestError."""
    if not isinstance(given, list) or not given:
        raise BadRequestError("messages", "a list of messages is wanted")
    found = [_message(item, f"messages.{at}") for at, item in enumerate(whole_values(given))]
    if found[-1]["role"] == "assistant":
        raise BadRequestError("messages", "the last one is the assistant's: add what the policy is to answer")
    return found


def _message(given: Any, field: str) -> Message:
    if not isinstance(given, Mapping) or given.get("role") not in ROLES:
        raise BadRequestError(field, f"an object with a role is wanted, one of {', '.join(ROLES)}")
    try:
        message = message_of(given)
    except NotTextError as error:
        raise BadRequestError(f"{field}.content", str(error)) from error
    except ValueError as error:
        raise BadRequestError(f"{field}.tool_calls", "a list is wanted, of the assistant") from error
    if "ids" in message:
        raise BadRequestError(f"{field}.ids", "token ids are not taken here")
    for key in ("reasoning_content", "tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str):
            raise BadRequestError(f"{field}.{key}", "text is wanted")
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if given["role"] != "assistant" or not isinstance(calls, list):
            raise BadRequestError(f"{field}.tool_calls", "a list is wanted, of the assistant")
        message["tool_calls"] = [_call(call, f"{field}.tool_calls.{at}") for at, call in enumerate(calls)]
    return message


def _call(given: Any, field: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequestError(field, "an object with a function is wanted, which has a name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # a history may quote calls that cannot be parsed
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": str(given["id"]), **call} if given.get("id") else call


def _check_tools(given: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    # the policy is shown the tools in any case
    if not given:
        return
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise BadRequestError("tools", "a list of tools is wanted")
    if sorted(map(_schema, given)) != sorted(map(_schema, tools)):
        known = json_text(list(tools))
        raise BadRequestError(
            "tools",
            "they are not those of rollout.session.tools, which the policy is shown. Leave them out, or send these: "
            + known,
        )


def _schema(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    if isinstance(function, Mapping):
        function = {key: value for key, value in function.items() if key != "strict" or value}
    return json.dumps({**tool, "function": function}, sort_keys=True)


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    found = {key: body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None}
    return min((length(key, value) for key, value in found.items()), default=None)


def length(field: str, value: Any) -> int:
    """A number of tokens that a request gives. Raises BadRequestError."""
    if type(value) is not int or not 1 <= value <= LONGEST:
        raise BadRequestError(field, f"a whole number from 1 to {LONGEST} is wanted")
    return value


def _stop(given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError("stop", "text or a list of texts is wanted")
    return texts


def _equal(value: Any, allowed: Any) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def completion(place: TurnKey, turn: Turn, model: str, created: int) -> dict[str, Any]:
    """A turn as an answer. Its ids depend on its place: a repeated request gets the same ids."""
    name = f"{place.branch}-{place.index}"
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if turn.tool_calls and not turn.content else turn.content,
        "refusal": None,
    }
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or f"call-{name}-{at}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json_text(call.arguments, default=str),
                },
            }
            for at, call in enumerate(turn.tool_calls)
        ]
    ended = "length" if turn.truncated else "tool_calls" if turn.tool_calls else "stop"
    made = len(turn.output_ids)
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": ended}],
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": turn.prompt_tokens + made,
        },
    }


def chunks(answer: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """An answer as the chunks of a stream; the last one holds the usage if it was asked for."""
    (choice,) = answer["choices"]
    message = choice["message"]
    head = {**answer, "object": "chat.completion.chunk"}
    total = head.pop("usage")
    if usage:
        head["usage"] = None

    def chunk(delta: dict[str, Any], ended: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": ended}]}

    yield chunk({"role": "assistant", "content": ""})
    for key in ("reasoning_content", "content"):
        if message.get(key):
            yield chunk({key: message[key]})
    for at, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": at, **call}]})
    yield chunk({}, choice["finish_reason"])
    if usage:
        yield {**head, "choices": [], "usage": total}


def models() -> dict[str, Any]:
    """The list of models."""
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "millrace"}],
    }
