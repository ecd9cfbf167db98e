"""A reward from an HTTP server.

The server gets {"prompt", "response", "label", "metadata"} as JSON. It answers with a number, or with a mapping: the key
`reward` holds the reward, and the other keys are its parts.
"""

from collections.abc import Mapping
from typing import Any

from millrace.connectors.http.posting import UnreadableError, post
from millrace.core.hooks.protocols import RewardInput
from millrace.core.hooks.slime.reward import under_reward


async def http(
    sample: RewardInput,
    *,
    url: str,
    headers: Mapping[str, str] | None = None,
    reward_key: str = "reward",
    timeout_s: float = 10.0,
    attempts: int = 3,
    pause_s: float = 0.5,
) -> Any:
    """Ask the server at `url` for a sample's reward. Give secrets in `headers` as references: "Bearer ${env:NAME}".

    timeout_s: of one attempt; reward.timeout_s limits all attempts and pauses together.
    Errors: UnreachableError, RefusedError, UnreadableError.
    """
    prompt = sample.prompt if isinstance(sample.prompt, str) else [dict(message) for message in sample.prompt]
    body = {
        "prompt": prompt,
        "response": sample.response,
        "label": sample.label,
        "metadata": dict(sample.metadata),
    }
    answer = await post(url, body, headers=headers, timeout_s=timeout_s, attempts=attempts, pause_s=pause_s)
    if not isinstance(answer, Mapping):
        return answer
    if reward_key not in answer:
        raise UnreadableError(
            f"its answer has no {reward_key}, only {sorted(answer)}",
            where=url,
            remedy="name its key in the option reward_key",
        )
    return under_reward(answer, reward_key)
