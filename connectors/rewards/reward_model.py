"""A reward from a served reward model: a sequence classifier behind SGLang, vLLM or text-embeddings-inference.

Owns the text that is scored and each server's API; knows nothing of the model. The reward model's chat template renders the
dialogue, not the policy's.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from millrace.connectors.http.posting import EXCERPT, UnreadableError, post
from millrace.core.contracts.images import with_words
from millrace.core.errors import ConfigError
from millrace.core.families.chat_templates import TemplateLimitError, apply_template
from millrace.core.hooks.protocols import RewardInput, RewardResult
from millrace.core.hooks.slime.sample import tokenizer as load_tokenizer

PATHS = {"sglang": "/classify", "vllm": "/pooling", "tei": "/predict"}
TRANSFORMS = ("none", "sigmoid")


async def reward_model(
    sample: RewardInput,
    *,
    url: str,
    server: Literal["sglang", "vllm", "tei"] = "sglang",
    model: str = "default",
    tokenizer: str | None = None,
    transform: Literal["none", "sigmoid"] = "none",
    api_key: str | None = None,
    timeout_s: float = 20.0,
    attempts: int = 3,
    pause_s: float = 0.5,
) -> RewardResult:
    """The model's score of a dialogue, or the sigmoid of it; part `score` is the plain score.

    url: of the server, without a path. tokenizer: folder or name of the reward model's tokenizer, whose chat template renders
    prompt and response; without one the prompt must be text, and the response is appended. api_key: a reference, ${env:NAME}.
    timeout_s: of one attempt.
    Errors: UnreachableError, RefusedError, UnreadableError if the server gives no single score; ConfigError.
    """
    for name, value, known in (("server", server, (*PATHS,)), ("transform", transform, TRANSFORMS)):
        if value not in known:
            raise ConfigError(
                f"{value} is not a choice",
                where=f"options of reward_model, {name}",
                remedy=f"give {' or '.join(known)}",
            )
    endpoint = url.rstrip("/") + PATHS[server]
    text = rendered(sample, tokenizer)
    bodies = {
        "sglang": {"model": model, "text": text},
        "vllm": {"model": model, "input": text},
        "tei": {"inputs": text, "raw_scores": True, "truncate": False},
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    answer = await post(
        endpoint, bodies[server], headers=headers, timeout_s=timeout_s, attempts=attempts, pause_s=pause_s
    )
    score = _score(answer, endpoint)
    given = score if transform == "none" else 0.5 * (1 + math.tanh(score / 2))
    return RewardResult(given, {"score": score})


def rendered(sample: RewardInput, tokenizer: str | None) -> str:
    """Prompt and response as one text, without the BOS token, which servers add.

    Errors: ConfigError for chat messages without a tokenizer, or for a tokenizer without a chat template.
    """
    if tokenizer is None:
        if not isinstance(sample.prompt, str):
            raise ConfigError(
                "the prompt is chat messages, and nothing says how to render them",
                where="options of reward_model, tokenizer",
                remedy="name the folder of the reward model",
            )
        return sample.prompt + sample.response
    loaded = load_tokenizer(tokenizer)
    if not loaded.chat_template:
        raise ConfigError(
            "it has no chat template",
            where=f"options of reward_model, tokenizer = {tokenizer}",
            remedy="name another tokenizer, or leave the option out",
        )
    prompt = sample.prompt
    asked = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else [{**m, "content": with_words(m.get("content"))} for m in prompt]
    )
    messages = [dict(m) for m in sample.messages] or [
        *asked,
        {"role": "assistant", "content": sample.response},
    ]
    try:
        text = apply_template(loaded, messages, for_answer=False)
    except TemplateLimitError as error:
        raise ConfigError(
            f"the chat template is refused: {error}",
            where=f"options of reward_model, tokenizer = {tokenizer}",
            remedy="name another tokenizer, or leave the option out",
        ) from error
    return text.removeprefix(loaded.bos_token or "")


def _score(answer: Any, endpoint: str) -> float:
    """The single number in {"embedding": [x]}, {"data": [{"data": [x]}]} or [{"score": x}], with or without a list around it."""
    found = answer
    while not isinstance(found, int | float) or isinstance(found, bool):
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        elif isinstance(found, Mapping) and (key := next((k for k in KEYS if k in found), None)):
            found = found[key]
        else:
            raise UnreadableError(
                f"its answer holds no single score: {json.dumps(answer)[:EXCERPT]}",
                where=endpoint,
                remedy="serve a reward model with one output, and name its server in the option server",
            )
    if not math.isfinite(found):
        raise UnreadableError(f"its score is {found}", where=endpoint, remedy="look at the server's dtype")
    return float(found)


KEYS = ("embedding", "data", "score")
