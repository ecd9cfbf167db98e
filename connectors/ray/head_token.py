"""The local head's token, which this process presents to it. For a configured cluster the user's own settings apply."""

from __future__ import annotations

import os
from collections.abc import Mapping

from millrace.connectors.host.local_files import home, secret_file

AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN = "ray-token"  # in MILLRACE_HOME


def added(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which Ray requires the local head's token, and presents it."""
    rest = {name: value for name, value in environment.items() if name not in AUTHENTICATION}
    return {**rest, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(secret_file(TOKEN))}


def bring(*, local: bool) -> None:
    """Let this process present the token to the local head, and the user's own settings to a configured cluster."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

    if local:
        wanted = added(os.environ)
    elif os.environ.get("RAY_AUTH_TOKEN_PATH") == str(home() / TOKEN) and "RAY_AUTH_TOKEN" not in os.environ:
        wanted = {name: value for name, value in os.environ.items() if name not in AUTHENTICATION}
    else:
        return
    for name in AUTHENTICATION:
        os.environ.pop(name, None)
        if name in wanted:
            os.environ[name] = wanted[name]
    # Ray has read the environment at its import, so it must read it again
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
