"""A row for every wait in the source that has no deadline beside it, with what bounds it; a new wait without one fails."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.source import SourceFile, read_source
from tests.house.waits import waits

# What bounds a wait. Those of the first group end by themselves, in a time that a limit bounds.
INSIDE = "what is called has a deadline itself: it passes through `progressing`"
HELD = "held only over what has a deadline itself, or over lines that await nothing"
RANKS = "in a rank: whoever called it watches all ranks and ends them where nothing moves (Actor.call)"
IN_ACTOR = "in an actor: whoever called it watches the actor and ends it where nothing moves (Actor.call)"
COUNTED = "a loop with a deadline or a number of tries of its own"
KILLED = "for a process that was killed, or that reads its end: the system ends it"
REWARD = "code of the user or of a judge: reward.timeout_s, or the limit of the session or filter that calls it, ends its process"
SESSION = "of a session: rollout.session.timeout_s of a call, rollout_timeout_s of the rollout, looked at by the pool"
REQUEST = "over requests to an engine, each of which rollout.progress_timeout_s ends"
SERVER = "in an engine's or a tool's own process, which serves until it is ended; its client has a deadline"
BACKGROUND = "nobody waits for it: it runs beside the run until it is cancelled"
# Nothing bounds these, and each says why.
TEST_ONLY = "a test's: the driver waits at a point until the test removes a file"
SHARD = "Ray says when its process or node dies; one that is stopped and does not die is waited for, as docs/architecture.md#waits says"
VIEWED = "outside any run: reads of storage and of a table in memory, for which a reader of the page waits"
TALK = "outside any run: for a token of an engine in this process, until its user presses Ctrl-C"
TRUSTED = "a command that asks nobody and waits for nothing but a disk"

ROWS = {
    "connectors/engines/embedded/__main__.py": {"done.wait": SERVER},
    "connectors/engines/embedded/chat.py": {
        "asyncio.shield(asyncio.to_thread(self.engine.withdraw, [request]))": SERVER,
        "ended.wait": SERVER,
    },
    "connectors/engines/embedded/engine.py": {
        "job.done.wait": SERVER,
        "self._wake.wait": SERVER,
        "with self._wake": SERVER,
    },
    "connectors/engines/embedded/server.py": {
        "asyncio.shield(asyncio.to_thread(self.engine.withdraw, requests))": SERVER,
        "queue.get": SERVER,
    },
    "connectors/engines/embedded/weight_routes.py": {"self._groups[name].broadcast(flat, 0).wait": SERVER},
    "connectors/host/gpu_busy.py": {"time.sleep": BACKGROUND},
    "connectors/host/process_identity.py": {"time.sleep": COUNTED},
    "connectors/storage/kernel_cache.py": {"time.sleep": BACKGROUND},
    "connectors/trainers/checkpoint/background.py": {
        "self._thread.join": "it follows the writer, and ends it where that writes nothing",
        "waiting.communicate": "of a process that was killed a line above, before it had a task",
    },
    "connectors/trainers/checkpoint/folders.py": {"dist.barrier": RANKS},
    "connectors/trainers/checkpoint/host_copy.py": {"self._preparing.join": RANKS},
    "connectors/trainers/megatron/model/expert_exchange.py": {"wait": RANKS},
    "connectors/trainers/megatron/optim/parameter_state.py": {"work.wait": RANKS},
    "connectors/trainers/megatron/weights/adapter_tensors.py": {"dist.recv": RANKS},
    "connectors/trainers/weights/engine_group.py": {"time.sleep": COUNTED, "work.wait": RANKS},
    "connectors/trainers/weights/export_folder.py": {"dist.barrier": RANKS},
    "connectors/mlflow/tracker.py": {"time.sleep": COUNTED},
    "connectors/prefect/app.py": {
        "asyncio.sleep": COUNTED,
        "self._signalled.wait": BACKGROUND,
    },
    "connectors/prefect/flow_run_state.py": {"asyncio.sleep": BACKGROUND},
    "connectors/prefect/garbage.py": {"asyncio.sleep": BACKGROUND},
    "connectors/prefect/retention.py": {"asyncio.sleep": BACKGROUND},
    "connectors/prefect/server.py": {"asyncio.sleep": BACKGROUND},
    "connectors/prefect/patches.py": {"asyncio.sleep": BACKGROUND, "time.sleep": BACKGROUND},
    "connectors/ray/actors.py": {
        "asyncio.sleep": COUNTED,
        "asyncio.wait": "made here, awaited by `while_moving` two lines below",
        "host.remote": "makes an actor and waits for nothing",
        "ray.remote": "declares the actor",
        "self._handle.call.remote": "`while_moving` watches it, of one actor or of a group",
    },
    "connectors/ray/head.py": {
        "connection.recv": "of a socket that was made with ASK_S as its limit",
        "self._ended.wait": BACKGROUND,
        "time.sleep": COUNTED,
    },
    "connectors/ray/placement.py": {
        "_visible.options(num_gpus=amount, scheduling_strategy=_in(group, bundle)).remote": "ray.get with PROBE_TIMEOUT_S waits for it",
        "ray.remote": "declares the task",
        "time.sleep": COUNTED,
        "with _lock": "held over a wait for room in the cluster: placement.wait_s",
    },
    "connectors/http/posting.py": {"asyncio.sleep": COUNTED},
    "connectors/teachers/served_teacher.py": {
        "async with self._free": "over requests with algorithm.teacher_server.timeout_s and attempts",
    },
    "connectors/engines/watched.py": {"async with self._polling": REQUEST},
    "connectors/engines/weight_update.py": {"asyncio.sleep": COUNTED},
    "connectors/engines/dispatcher.py": {
        "asyncio.shield(self._recovering)": "engines are started again: engines.start_timeout_s, engines.restarts",
        "asyncio.sleep": "until requests that were aborted end: rollout.progress_timeout_s ends each",
    },
    "connectors/engines/external.py": {"asyncio.sleep": COUNTED},
    "connectors/engines/spanning.py": {"asyncio.sleep": COUNTED},
    "connectors/engines/process.py": {
        "process.wait": IN_ACTOR,
        "self._process.wait": IN_ACTOR,
        "time.sleep": COUNTED,
    },
    "connectors/engines/sglang/router.py": {
        "async with self._checking": REQUEST,
        "async with self._settling": "held for SETTLE_TIMEOUT_S at most",
    },
    "connectors/storage/changes.py": {"with self._lock": HELD},
    "connectors/host/local_server.py": {"time.sleep": COUNTED},
    "connectors/storage/lease.py": {"time.sleep": COUNTED},
    "connectors/host/local_files.py": {
        "fcntl.flock": "asked without waiting (LOCK_NB), in a loop with a deadline",
        "file.readline": TRUSTED,
        "time.sleep": COUNTED,
    },
    "connectors/trainers/megatron/conversion/conversion.py": {
        "fcntl.flock": "asked without waiting (LOCK_NB)"
    },
    "connectors/host/own_folders.py": {"fcntl.flock": "asked without waiting (LOCK_NB)"},
    "connectors/user_code/mcp_server.py": {
        "asyncio.shield(self._opened)": "START_TIMEOUT_S ends the attempt",
        "asyncio.wait": "the connection ends itself; the session pool ends a process that does not end",
        "self._closing.wait": SERVER,
    },
    "connectors/user_code/mcp_tools.py": {"asyncio.shield(self._listing)": "START_TIMEOUT_S a server"},
    "connectors/user_code/pool.py": {
        "await future": "`timeout_s` of the call, looked at by the thread that makes it",
        "with self._lock": HELD,
    },
    "connectors/user_code/process.py": {
        "pipe.recv_bytes": SERVER,
        "self._pipe.recv_bytes": "`poll` found a message before it, and the worker sends whole ones",
        "self._process.join": KILLED,
        "time.sleep": COUNTED,
        "with _starting_or_closing": HELD,
    },
    "connectors/user_code/sandbox.py": {"self._process.wait": KILLED, "subprocess.run": TRUSTED},
    "connectors/user_code/session_pool.py": {
        "async with self._starting": "over a start with START_TIMEOUT_S",
        "asyncio.sleep": BACKGROUND,
        "await self._ready": "called within START_TIMEOUT_S",
        "await session.end": "GRACE_S after a cancel the pool kills the process, which ends it",
        "reader.readline": BACKGROUND,
    },
    "connectors/user_code/session_server.py": {"asyncio.shield(answer)": SESSION},
    "connectors/user_code/session_worker.py": {"await future": SESSION, "reader.readline": SERVER},
    "core/families/chat_templates.py": {"with self._lock": HELD},
    "core/hooks/reward_forms.py": {"await answer": REWARD},
    "core/rewards/tournament/group_reward.py": {"async with limit": REWARD, "await answer": REWARD},
    "core/sessions/forms.py": {"await closing": SESSION, "await outcome": SESSION},
    "core/hooks/slime/generate.py": {"asyncio.shield(known)": SESSION, "await made": SESSION},
    "core/hooks/slime/hub.py": {"await answer": SESSION},
    "core/hooks/slime/reward.py": {"await answer": REWARD},
    "core/contracts/progress.py": {
        "ended.wait": "for the seconds until a line is due again",
        "thread.join": "it was told to end a line above, and does nothing else but log",
    },
    "core/waits.py": {
        "await result": "the thread may hang: callers pass it to `progressing`",
        "lock.acquire": "made here, awaited by `progressing` two lines below",
    },
    "deployments/gpu/pack.py": {"subprocess.run": "a tool that its user watches, outside any run"},
    "flows/chat/speaker.py": {
        "asyncio.shield(asyncio.to_thread(self._engine.withdraw, [request]))": TALK,
        "news.get": TALK,
    },
    "flows/drive.py": {"asyncio.sleep": BACKGROUND},
    "flows/driver/interruption.py": {
        "work_thread.ended.wait": "POLL_S; the loop lasts as long as the command works",
    },
    "flows/driver/iteration_slots.py": {
        "async with self._changed": HELD,
        "progress.wait": INSIDE,
        "self._changed.wait_for": INSIDE,
        "self.progress.wait": INSIDE,
    },
    "connectors/huggingface/pretrained.py": {
        "subprocess.run": "pip's download, which its user watches, outside any run"
    },
    "flows/driver/run_record.py": {"subprocess.run": TRUSTED},
    "flows/preflight/check.py": {"thread.join": "PATIENCE_S or DISK_PATIENCE_S a check"},
    "flows/commands/stop.py": {"time.sleep": COUNTED},
    "flows/commands/top.py": {"time.sleep": "outside any run: until its user ends it"},
    "flows/viewer/answers.py": {"with self._lock": VIEWED},
    "flows/viewer/index.py": {"with self._lock": VIEWED},
    "flows/viewer/group_places.py": {"with self._lock": VIEWED},
    "flows/viewer/stored.py": {"with self._lock": VIEWED},
    "flows/train.py": {"await evaluated": "a task of this iteration: requests and scores have limits"},
    "tasks/checkpoint.py": {
        "asyncio.sleep": "the rank ends a writer that writes nothing: it has failed then"
    },
    "tasks/data/images.py": {"with self._lock": HELD},
    "tasks/data/rows.py": {"with self._lock": HELD},
    "tasks/filter.py": {"await loading": "CREDIT_TIMEOUT_S of the call"},
    "tasks/kill_points.py": {"asyncio.sleep": TEST_ONLY},
    "tasks/reporting/report.py": {"ctx.stream.wait": INSIDE},
    "tasks/reward.py": {"await finished": REWARD, "ctx.stream.wait": INSIDE},
    "tasks/rollout.py": {
        "asyncio.sleep": "of no length: others get a turn",
        "ctx.stream.wait": INSIDE,
    },
    "tasks/runtime/cluster.py": {"self.join": INSIDE},
    "tasks/runtime/engines.py": {"self._cluster.join": INSIDE, "asyncio.sleep": BACKGROUND},
    "tasks/runtime/tracking.py": {"time.sleep": COUNTED},
    "tasks/runtime/trainer.py": {"self._cluster.join": INSIDE},
    "tasks/runtime/weights_folder.py": {"await removal": "of a folder, which storage does within its limits"},
    "tasks/batching/eager_passes.py": {"stream.wait": INSIDE},
    "tasks/batching/row_sources.py": {"stream.wait": INSIDE},
    "tasks/batching/batch_selection.py": {"ctx.stream.wait": INSIDE},
    "tasks/generation/admission.py": {"await given": REQUEST, "asyncio.sleep": BACKGROUND},
    "tasks/generation/single_samples.py": {
        "async with self._ready": HELD,
    },
    "tasks/generation/part_writer.py": {
        "async with self._moved": HELD,
        "self._moved.wait_for": INSIDE,
        "self._queue.get": "until the body of `open` ends, which has deadlines itself",
    },
    "tasks/scoring/scoring_batches.py": {"await future": REWARD},
    "tasks/generation/sessions/runner.py": {"async with self._rollouts": SESSION},
    "tasks/generation/sessions/session_rollout.py": {"self._places.acquire": SESSION},
    "tasks/shards/board.py": {
        "self._changed.wait": "the timeout that is asked for: CALL_S",
        "self._cluster.join": INSIDE,
        "with self._changed": HELD,
    },
    "tasks/shards/attempts.py": {
        "async with self._settling": HELD,
        "async with self._moved": HELD,
        "asyncio.shield(self._working)": "it watches for the failure of what has deadlines, and ends with the shards",
        "self._moved.wait_for": "what shards have told already, or a shard that is to say that it is idle: Ray says when it dies",
        "self._wanted.wait": BACKGROUND,
        "stream.wait": BACKGROUND,
    },
    "tasks/shards/shard.py": {
        "async with self._changed": HELD,
        "self._changed.wait_for": "the driver's answer: engines are made ready there with limits of their own",
    },
    "tasks/stream.py": {"async with self._changed": HELD, "self._changed.wait_for": INSIDE},
    "tasks/train_step.py": {"asyncio.wait": "a task of this iteration: requests and scores have limits"},
}


def test_every_wait_has_a_deadline_beside_it_or_a_row_that_says_what_bounds_it() -> None:
    found: dict[str, set[str]] = {}
    for wait in waits(read_source(Path(__file__).parents[2])):
        found.setdefault(wait.path, set()).add(wait.what)
    assert found == {path: set(rows) for path, rows in ROWS.items()}


REPORTED = (
    "await stream.wait(3)",
    "await event.wait()",
    "await asyncio.wait(tasks)",
    "await condition.wait_for(ready)",
    "item = await queue.get()",
    "await lock.acquire()",
    "await task",
    "await self.finished",
    "await asyncio.shield(task)",
    "thread.join()",
    "thread.join(3)",
    "process.wait()",
    "process.communicate(data)",
    "pipe.recv_bytes()",
    "ray.get(reference)",
    "ray.wait([reference])",
    "await handle.train.remote(3)",
    "dist.barrier()",
    "subprocess.run(['git'])",
    "fcntl.flock(file, fcntl.LOCK_EX)",
    "while not done():\n        await asyncio.sleep(1)",
    "while not done():\n        time.sleep(1)",
    "async with self._lock:\n        pass",
    "with _lock:\n        pass",
    "await asyncio.wait(tasks, timeout=None)",
)
BOUNDED = (
    "await progressing(stream.wait(3), 'parts', limit, heartbeat)",
    "await while_moving(actors, method, asyncio.wait(calls))",
    "async with asyncio.timeout(3):\n        await event.wait()",
    "async with asyncio.timeout_at(end), other():\n        await queue.get()",
    "await asyncio.wait(tasks, timeout=3)",
    "process.communicate(data, timeout=3)",
    "ray.get(reference, timeout=3)",
    "subprocess.run(['git'], timeout=3)",
    "async with locked(self._lock, 'it', limit):\n        pass",
    "text = ', '.join(names)",
    "value = settings.get('a')",
    "await asyncio.sleep(1)",
    "await trainer.train(3)",
)


def of(snippet: str) -> list[str]:
    text = f"async def act():\n    {snippet}\n"
    return [wait.what for wait in waits([SourceFile("tasks/x.py", text)])]


@pytest.mark.parametrize("snippet", REPORTED)
def test_a_wait_without_a_deadline_is_found(snippet: str) -> None:
    assert of(snippet)


@pytest.mark.parametrize("snippet", BOUNDED)
def test_a_bounded_wait_and_what_does_not_wait_need_no_row(snippet: str) -> None:
    assert not of(snippet)


def test_the_time_between_looks_needs_the_runs_own_limit() -> None:
    """Actors are found and made with the limit that the configuration gives, never with the usual one."""
    asks = ("make", "find", "find_alive", "find_group")
    for file in read_source(Path(__file__).parents[2]):
        if file.path.startswith(("tasks/", "flows/")):
            for node in ast.walk(file.tree):
                if isinstance(node, ast.Call) and _is_of_actors(node.func, asks):
                    assert "limit" in {keyword.arg for keyword in node.keywords}, (file.path, node.lineno)


def _is_of_actors(function: ast.expr, names: tuple[str, ...]) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in names
        and ast.unparse(function.value) == "actors"
    )
