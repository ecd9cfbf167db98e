"""Reading the JSON body of a request. Apart from `access`, which drivers import: this loads torch."""

import json
from typing import Any

from aiohttp import web

from millrace.connectors.engines.embedded.sampling import RequestError


async def read_json(http: web.Request) -> dict[str, Any]:
    """The body's JSON object; an empty body is an empty object. Raises RequestError for anything else."""
    raw = await http.read()
    if not raw:
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is {type(body).__name__}, an object is wanted")
    return body
