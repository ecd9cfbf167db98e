"""A user's modules as text: functions and an MCP server that get secrets, note that they did, and say them when they fail."""

FUNCTIONS = """
import base64, hashlib
from pathlib import Path
from urllib.parse import quote

HERE = Path(__file__).parent

def given(place, env, block):
    seen = HERE / "seen" / f"{place}.{hashlib.sha256((env + block).encode()).hexdigest()}"
    seen.parent.mkdir(exist_ok=True)
    seen.touch()

def complaint(*secrets):
    login = [base64.b64encode(f"user:{secret}".encode()).decode() for secret in secrets]
    return f"{secrets!r} https://host/?key={quote(secrets[0], safe='')} {login} {' '.join(secrets)}"

def fails_once(place, *secrets):
    wanted = HERE / f"{place}.fails"
    if wanted.exists():
        wanted.unlink()
        try:
            raise OSError(complaint(*secrets))
        except OSError as error:
            raise RuntimeError("the service refuses" if place == "loss" else complaint(*secrets)) from error

def prepare(config, *, env, block):
    given("prepare", env, block)
    fails_once("prepare", env, block)

def reward(sample, *, env, block):
    given("reward", env, block)
    if sample.prompt[0] in "02468" and sample.prompt != "0+0=":  # on which the check tries it
        raise OSError(complaint(env, block))
    return len(sample.response) / 16

def hint(sample, *, env, block):
    given("hint", env, block)
    if sample.prompt[0] == "1":
        raise OSError(complaint(env, block))
    return f"The answer is {sample.label}."

def group_filter(samples, *, env, block):
    given("group_filter", env, block)

def buffer_filter(groups, *, env, block):
    given("buffer_filter", env, block)
    fails_once("buffer_filter", env, block)
    return groups

def shaping(rewards, response_lengths, truncated, *, env, block):
    given("shaping", env, block)
    return rewards

def advantage(rewards, group_ids, *, env, block):
    given("advantage", env, block)
    return rewards - rewards.mean()

def loss(batch, *, env, block):
    given("loss", env, block)
    fails_once("loss", env, block)
    return -batch.advantages * batch.logprobs, {}

class Rows:
    def __init__(self, *secrets):
        self.secrets = secrets

    def __len__(self):
        return 40

    def __getitem__(self, number):
        if number % 20 == 7:
            raise OSError(complaint(*self.secrets))
        return {
            "prompt": f"{number % 10}+{number // 10}=",
            "label": "1",
            "metadata": {"rollout": "other", "reward": "named"},
        }

def rows(*, env, block):
    given("rows", env, block)
    fails_once("rows", env, block)
    return Rows(env, block)

async def plays(session, *, env, block):
    given("plays", env, block)
    await session.generate()
    if session.task.index == 1:
        raise OSError(complaint(env, block))
    for tool in ("note", "of_command", "of_url"):
        session.observe(await session.call(tool, fails=session.task.index == 2), "user")
    await session.generate()

async def other(session, *, env, block):
    given("other", env, block)
    await session.generate()
    if session.task.index == 1:
        raise OSError(complaint(env, block))

def note(fails: bool, env: str, block: str) -> str:
    '''Note it.

    Args:
        fails: Whether it does.
    '''
    given("note", env, block)
    if fails:
        raise OSError(complaint(env, block))
    return "ok"

class Environment:
    recovery = "stateless"

    def __init__(self, *, env, block):
        given("Environment", env, block)
        self.secrets = env, block

    async def reset(self, task):
        self.index = task.index

    async def step(self, turn):
        from millrace import Done

        if self.index == 1:
            raise OSError(complaint(*self.secrets))
        return Done(len(turn.output_ids) / 16)

    async def close(self):
        pass
"""
SERVER = """
import os, sys

from mcp.server.mcpserver import Context, MCPServer

from planted import complaint, given

server = MCPServer("planted")

def answer(place, fails, env, block):
    given(place, env, block)
    if fails:
        raise OSError(complaint(env, block))
    return "ok"

if sys.argv[1:]:
    @server.tool()
    def of_url(fails: bool, ctx: Context) -> str:
        "Ask."
        return answer("of_url", fails, ctx.headers["x-env"], ctx.headers["x-block"])

    server.run(transport="streamable-http", port=int(sys.argv[1]))
else:
    @server.tool()
    def of_command(fails: bool) -> str:
        "Ask."
        return answer("of_command", fails, os.environ["OF_ENV"], os.environ["OF_BLOCK"])

    server.run()
"""
