"""sglang-router's process: its own launcher, with the key that requests must bring.

    python -m millrace.connectors.sglang.router_process OPTIONS OF sglang_router.launch_router

The key comes in the environment, since every user of the machine sees a command line.
"""

from __future__ import annotations

import os
import sys

KEY = "MILLRACE_ROUTER_KEY"


def main() -> None:
    """Serve until ended."""
    from sglang_router.launch_router import (  # type: ignore[import-untyped]
        launch_router,
        parse_router_args,
    )

    args = parse_router_args(sys.argv[1:])
    args.api_key = os.environ.pop(KEY)
    # without one the router lets the pages of every origin read its answers
    args.cors_allowed_origins = args.cors_allowed_origins or [f"http://{args.host}:{args.port}"]
    if args.policy == "power_of_two":  # it starts with two workers or not at all; these never answer
        args.worker_urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    launch_router(args)


if __name__ == "__main__":
    main()
