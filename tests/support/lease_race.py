"""A race for a lease: processes and threads take it at the same moment, round after round. Prints the tokens held in each.

python lease_race.py ROOT PROCESSES THREADS ROUNDS
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
from multiprocessing.synchronize import Barrier
from typing import Any

import s3fs  # noqa: F401 - before the processes fork: it takes a second

from millrace.connectors.storage.lease import Lease
from millrace.connectors.storage.store import Store
from millrace.core.errors import LeaseHeldError


def race(root: str, barrier: Barrier, rounds: int, found: Any) -> None:
    """One racer's part in every round. Whoever holds the lease gives it back when all have tried."""
    for number in range(rounds):
        held = None
        barrier.wait()
        try:
            held = Lease.take(Store(root))
            found.put((number, held.token))
        except LeaseHeldError:
            pass
        barrier.wait()
        if held is not None:
            held.release()


def racers(root: str, threads: int, barrier: Barrier, rounds: int, found: Any) -> None:
    """A process of several racers."""
    running = [threading.Thread(target=race, args=(root, barrier, rounds, found)) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def main(root: str, processes: int, threads: int, rounds: int) -> None:
    """Race, and print a list of tokens a round."""
    forking = multiprocessing.get_context("fork")
    barrier, found = forking.Barrier(processes * threads), forking.SimpleQueue()
    started = [
        forking.Process(target=racers, args=(root, threads, barrier, rounds, found)) for _ in range(processes)
    ]
    for process in started:
        process.start()
    held: list[list[int]] = [[] for _ in range(rounds)]
    for process in started:
        process.join()
    while not found.empty():
        number, token = found.get()
        held[number].append(token)
    print(json.dumps(held))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
