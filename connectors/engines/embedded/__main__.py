"""`python -m millrace.connectors.engines.embedded`: start the engine's server.

With MILLRACE_ENGINE_KEY in the environment every request except /health must bring that key.
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path


def main() -> None:
    """Parse arguments and serve until stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m millrace.connectors.engines.embedded", description=__doc__
    )
    parser.add_argument("--model-path", required=True, help="Hugging Face checkpoint folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; loopback by default")
    parser.add_argument("--port", type=int, default=30000, help="port; 0 takes a free one, see --port-file")
    parser.add_argument("--port-file", type=Path, help="where the port is written once the server listens")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--max-total-tokens", type=int, default=65536, help="tokens of KV cache")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of weights and arithmetic; auto: as the folder stores them",
    )
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--max-loaded-loras", type=int, default=0, help="adapters that requests may name, at the same time"
    )
    parser.add_argument("--weight-version", default="default")
    parser.add_argument(
        "--name", action="append", default=[], help="a name of this machine that requests may use; repeatable"
    )
    parser.add_argument("--seed", type=int, help="seed for requests that bring none")
    parser.add_argument(
        "--finished-log",
        default=os.environ.get("MILLRACE_FINISHED_LOG"),
        help="file to which a line for every request that ended is appended, to count them: its rid, why it ended and how many "
        "tokens were generated for it; by default MILLRACE_FINISHED_LOG of the environment",
    )
    asyncio.run(serve(parser.parse_args()))


async def serve(args: argparse.Namespace) -> None:
    """Load the model, listen, and report the address."""
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch
    from aiohttp import web

    from millrace.connectors.engines.embedded.access import KEY, Access
    from millrace.connectors.engines.embedded.engine import Engine
    from millrace.connectors.engines.embedded.model import ModelError
    from millrace.connectors.engines.embedded.server import Server

    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        engine = Engine(
            args.model_path,
            max_running=args.max_running_requests,
            max_total_tokens=args.max_total_tokens,
            weight_version=args.weight_version,
            seed=args.seed,
            finished_log=args.finished_log,
            dtype=args.dtype,
            max_adapters=args.max_loaded_loras,
        )
    except ModelError as error:
        raise SystemExit(f"--model-path: {error}") from None
    info = {
        "engine": "embedded",
        "model_path": args.model_path,
        "max_running_requests": args.max_running_requests,
        "max_total_tokens": args.max_total_tokens,
        "enable_lora": args.max_loaded_loras > 0,
        "max_loaded_loras": args.max_loaded_loras,
        "dtype": str(engine.decoder.weights.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }
    engine.start()
    access = Access(os.environ.pop(KEY, None), [args.host, *args.name])
    runner = web.AppRunner(
        Server(engine, info, access).app(), access_log=None, handler_cancellation=True, shutdown_timeout=1
    )
    await runner.setup()
    site = web.TCPSite(runner, args.host, args.port)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    if args.port_file:
        aside = args.port_file.with_suffix(".aside")
        aside.write_text(str(port))
        aside.replace(args.port_file)
    print(f"embedded engine serves {args.model_path} at http://{args.host}:{port}", flush=True)
    done = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    await done.wait()
    await runner.cleanup()
    engine.stop()


if __name__ == "__main__":
    main()
