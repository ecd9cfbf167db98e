"""sglang-router's process: its launcher, with the key that requests must bring.

    python -m millrace.connectors.engines.sglang.router_process OPTIONS OF sglang_router.launch_router

The key is passed in the environment, since every user of the machine can see command lines.
"""

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
    # without allowed origins the router lets every web page read its answers
    args.cors_allowed_origins = args.cors_allowed_origins or [f"http://{args.host}:{args.port}"]
    # power_of_two needs two workers to start, so it gets two that never answer
    if args.policy == "power_of_two":
        args.worker_urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    launch_router(args)


if __name__ == "__main__":
    main()
