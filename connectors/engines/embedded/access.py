"""Access to the embedded engine: a request needs its key, must be JSON, and must not come from a web page.

Decides once per request, by its headers only. Knows no endpoint except /health, which is open to all.
"""

import hmac
import ipaddress
import socket
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

OPEN = ("/health",)
KEY = "MILLRACE_ENGINE_KEY"  # the variable with the key of the engine to start


class Access:
    """Accepts a request, or returns the reason to refuse it.

    key: required in `Authorization: Bearer`; None requires none. names: host names by which the engine may be addressed, besides
    IP addresses, localhost and this machine's name. A web page whose name was pointed at this machine sends another name.
    """

    def __init__(self, key: str | None, names: Iterable[str] = ()) -> None:
        self._expected = f"Bearer {key}".encode() if key else None
        here = ("localhost", socket.gethostname(), *names)
        self._names = {name.lower() for name in here}

    def refusal(self, request: web.Request) -> tuple[int, str] | None:
        """Status and reason if the request is refused, else None."""
        headers = request.headers
        if not self._is_here(headers.get("Host", "")):
            return 403, "Host: it names another machine; start the engine with --name for a name of this one"
        if "Origin" in headers:
            return 403, "Origin: web pages may not ask"
        if request.path not in OPEN and not self._knows_key(headers.get("Authorization", "")):
            return 401, "Authorization: the engine's key is wanted as a Bearer token"
        if request.body_exists and request.content_type != "application/json":
            return 415, "Content-Type: application/json is wanted"
        return None

    def _knows_key(self, given: str) -> bool:
        return self._expected is None or hmac.compare_digest(
            given.encode("utf-8", "surrogateescape"), self._expected
        )

    def _is_here(self, host: str) -> bool:
        name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def middleware(access: Access) -> Middleware:
    """Check access before every handler, also for unknown paths."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = access.refusal(request)
        if refusal is None:
            return await handler(request)
        status, reason = refusal
        message = {"object": "error", "message": reason, "type": "Refused", "code": status}
        return web.json_response({**message, "success": False, "error": message}, status=status)

    return check
