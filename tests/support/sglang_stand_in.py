"""What answers to `python -m sglang.launch_server` where no GPU is: the embedded engine, on one node or on several.

It takes SGLang's options for several nodes and their order: all processes meet at --dist-init-addr, and only then does the first one
answer. The first answers requests; each stands for one GPU, so the first hands weights for all GPUs on to the others. A process
that loses another goes on and waits for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RELAYED = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
)
FAILS = "SGLANG_STAND_IN_FAILS"  # a file with a node's rank and a text: its process ends with the text before it meets the others
MEETS_S = 60.0


STARTS = "from tests.support.sglang_stand_in import main\n\nmain()\n"


def install(folder: Path, program: str = STARTS) -> dict[str, str]:
    """Environment variables with which a server's process runs a program in place of SGLang: this one, if none is given."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(program)
    path = os.pathsep.join(map(str, (folder, REPOSITORY / "src", REPOSITORY)))
    return {"MILLRACE_SGLANG_PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Meet the other nodes' processes, then serve until stopped."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "host", "weight-version", "dist-init-addr", "config", "dtype"):
        parser.add_argument(f"--{name}")
    for name in ("port", "nnodes", "node-rank", "tp-size"):
        parser.add_argument(f"--{name}", type=int, default=1 if name == "nnodes" else 0)
    args, _ = parser.parse_known_args()
    assert args.tp_size == args.nnodes, "each process stands for one GPU"
    fails = Path(os.environ.get(FAILS, "/nowhere"))
    rank, _, text = fails.read_text().partition(" ") if fails.exists() else ("", "", "")
    if rank == str(args.node_rank):
        fails.unlink()
        sys.exit(text)
    asyncio.run(serve(args))


async def serve(args: argparse.Namespace) -> None:
    """Load the model, meet, and answer."""
    import torch
    from aiohttp import web

    from millrace.connectors.engines.embedded.access import Access
    from millrace.connectors.engines.embedded.engine import Engine
    from millrace.connectors.engines.embedded.server import Server

    torch.set_num_threads(1)
    engine = Engine(
        args.model_path,
        max_running=64,
        max_total_tokens=65536,
        weight_version=args.weight_version,
        seed=None,
        finished_log=os.environ.get("MILLRACE_FINISHED_LOG"),
        dtype=args.dtype,
    )
    engine.start()
    key = None if args.node_rank else json.loads(Path(args.config).read_text())["api-key"]
    app = Server(
        engine, {"engine": "embedded", "model_path": args.model_path}, Access(key, [args.host])
    ).app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    others: list[str] = []
    app.middlewares.append(_relaying(others))
    await runner.setup()
    if args.node_rank:
        await web.TCPSite(runner, args.host, args.port).start()
        held = await asyncio.to_thread(_join, args.dist_init_addr, f"http://{args.host}:{args.port}")
    else:
        held = await asyncio.to_thread(_meet, args.dist_init_addr, args.nnodes, others)
        await web.TCPSite(runner, args.host, args.port).start()
    assert held is not None
    await asyncio.Event().wait()


def _meet(address: str | None, nodes: int, others: list[str]) -> list[socket.socket]:
    """Wait for the further nodes' processes, and note their URLs."""
    if nodes == 1:
        return []
    host, _, port = str(address).rpartition(":")
    with socket.create_server((host, int(port))) as server:
        server.settimeout(MEETS_S)
        joined = [server.accept()[0] for _ in range(nodes - 1)]
    others += [one.makefile().readline().strip() for one in joined]
    for one in joined:
        one.sendall(b"ready\n")
    return joined


def _join(address: str, url: str) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    for _ in range(int(MEETS_S / 0.05)):
        try:
            one = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    else:
        sys.exit(f"nobody at {address}")
    one.sendall(f"{url}\n".encode())
    assert one.makefile().readline() == "ready\n"
    return [one]


def _relaying(others: list[str]) -> Any:
    """Sends what concerns the weights of all GPUs to the further processes too; the rank of the first GPU is in the body."""
    from aiohttp import ClientSession, web

    async def post(session: ClientSession, url: str, body: dict[str, Any]) -> None:
        async with session.post(url, json=body) as answer:
            said = await answer.json()
            assert said.get("success"), said

    @web.middleware
    async def relay(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in RELAYED or not others:
            return await handler(request)
        body = await request.json()
        async with ClientSession() as session:
            calls = []
            for further, url in enumerate(others, 1):
                moved = {"rank_offset": body["rank_offset"] + further} if "rank_offset" in body else {}
                calls.append(post(session, f"{url}{request.path}", {**body, **moved}))
            answer, *_ = await asyncio.gather(handler(request), *calls)
        return answer

    return relay
