"""Answers that ask for more than a machine can compute are scored 0 at once, in the worker process of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.connectors.user_code.pool import WorkerPool
from millrace.core.hooks.protocols import RewardInput
from millrace.core.rewards.number import arithmetic
from tests.support import worker_functions as work

SECONDS = 1.0  # of CPU time
MIB = 500
AT_ONCE = 0.05  # CPU seconds for the refusal of what needs no algebra

TOWERS = [
    r"10^{10^{10}}", r"9^{9^{9^{9}}}", r"2^{2^{2^{2^{2^{2}}}}}", r"10^{-10^{10^{10}}}", r"10^{10^{3+1+1+1+1+1+1}}",
    r"99999999!", r"((9!)!)!", r"9!!!!!!", "10**10**10", r"2^{33000}-1", r"\exp(\exp(\exp(\exp(10))))",
    "1e99999999", "1e-99999999", "1e" + "9" * 50, r"7\times 10^{99999999}", r"1.5\cdot 10^{99999}",
    r"\left(-\infty, 10^{10^{10}}\right)", r"\{10^{10^{10}}, 9^{9^{9^9}}\}", r"x=10^{10^{10}}", r"5 < 10^{10^{10}}",
    r"10^{10^{10}}=10^{10^{11}}", r"\lfloor 10^{10^{10}}\rfloor", r"|10^{10^{10}}|", r"\sin(10^{10^{10}})",
    r"\log(10^{10^{10}})", r"\gcd(10^{10^{10}},6)", r"x^{10^{10}}|_{x=3}",
    r"\sum_{n=1}^{1000000} n", r"\sum_{n=1}^{1000000}\frac{1}{n^2}", r"\prod_{n=1}^{100000}(n+1)",
    r"\binom{1000000000}{500000000}", r"\Gamma(10^{9})",
    r"\operatorname{eye}(100000)", r"\operatorname{zeros}(100000,100000)",
    r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{1000000000}",
    r"\begin{pmatrix}" + r"\\".join(["&".join("9" * 12)] * 12) + r"\end{pmatrix}",
    "(" * 180 + "1" + ")" * 180, "{" * 190 + "1" + "}" * 190, r"\frac{1}{" * 40 + "1" + "}" * 40,
    r"\sqrt{" * 50 + "2" + "}" * 50, "2^{" * 60 + "2" + "}" * 60, "9" * 399, "9" * 5000, "0." + "3" * 390,
]  # fmt: skip
SLOW_ALGEBRA = [
    r"\begin{vmatrix}" + r"\\".join("&".join("abcdefg"[i:] + "abcdefg"[:i]) for i in range(7)) + r"\end{vmatrix}",
    r"(1+x)^{10000}", r"(a+b+c+d+e)^{40}", r"(a+b+c)^{200}-(c+b+a)^{200}", r"\sin(x)^{20}+\cos(x)^{20}",
    r"\int_0^1 x^{x^{x^{x}}} dx", r"\int e^{x^2}\sin(x)\log(x)\sqrt{x^3+1}dx",
    r"\lim_{x \to 0} \frac{\sin(x^{100})-x^{100}}{x^{300}}", r"\cos(\frac{\pi}{65537})",
    r"(\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11})^{30}", r"\tan(\frac{\pi}{17})+\tan(\frac{\pi}{19})",
    "1+" * 100 + "1", "1," * 120 + "1",
]  # fmt: skip
NO_ANSWERS = [
    "^" * 300, "_" * 300, "\\" * 399, r"\frac" * 60, "!" * 390, "=" * 300, "1=" * 150 + "1", "," * 390, "-" * 399,
    r"\text{" * 80, "a" * 399, r"\infty-\infty", r"\frac{0}{0}", r"0^{-1}", r"\log(0)", r"[0\infty,1]",
    r"\pi\begin{pmatrix}1\\2\end{pmatrix}=3", "1e9999", r"1e9999\%", r"1e9999\pi", "\x00\x01", "½", "²", "1..2",
]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(1)
    yield made
    made.close()


async def _grade(pool: WorkerPool, response: str, label: str) -> tuple[float, float, float]:
    """Reward, CPU seconds, and MiB that the worker grew by."""
    row: dict[str, Any] = {
        "prompt": '"?"', "response": response, "label": json.dumps(label), "metadata": None,
        "response_length": 1, "status": "completed",
    }  # fmt: skip
    outcome = await pool.call(work.graded, "millrace.core.rewards.math:math", row, timeout_s=30)
    assert outcome.kind == "done", (response[:60], outcome)
    found: tuple[float, float, float] = outcome.value
    return found


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(TOWERS, id="towers"),
        pytest.param(SLOW_ALGEBRA, id="algebra", marks=pytest.mark.slow),
        pytest.param(NO_ANSWERS, id="none"),
    ],
)
async def test_no_answer_takes_the_worker_long(pool: WorkerPool, answers: list[str]) -> None:
    await _grade(pool, r"\boxed{x}", r"\sqrt{7}")  # loads the library
    problems = []
    for answer in answers:
        for response, label in (
            (rf"\boxed{{{answer}}}", "7"),
            (r"\boxed{x^2+1}", answer),
            (answer, r"\sqrt{2}"),
        ):
            reward, seconds, grown = await _grade(pool, response, label)
            if reward != 0 or seconds > SECONDS or grown > MIB:
                problems.append((answer[:60], label[:20], reward, seconds, grown))
    assert problems == []


async def test_a_number_out_of_reach_is_refused_before_anything_is_computed(pool: WorkerPool) -> None:
    await _grade(pool, r"\boxed{x}", r"\sqrt{7}")
    taken = {answer: (await _grade(pool, rf"\boxed{{{answer}}}", "7"))[1] for answer in TOWERS}
    assert {answer[:60]: seconds for answer, seconds in taken.items() if seconds > AT_ONCE} == {}


async def test_what_is_too_large_to_compute_is_still_compared_as_text(pool: WorkerPool) -> None:
    assert (await _grade(pool, r"\boxed{10^{10^{10}}}", r" 10^{10^{10}} "))[0] == 1


@pytest.mark.parametrize(
    ("one", "other"), [(r"2024^{2024}", r"2024^{2023}\cdot 2024"), (r"100!", r"100\cdot 99!")]
)
async def test_large_numbers_within_the_bound_are_computed(pool: WorkerPool, one: str, other: str) -> None:
    assert (await _grade(pool, rf"\boxed{{{one}}}", other))[0] == 1


@pytest.mark.parametrize("response", ["1e99999999", "1e-99999999", "-1e99999999", "9" * 5000])
def test_arithmetic_refuses_them_too(response: str) -> None:
    assert arithmetic(RewardInput(prompt="?", response=response, label=7)).reward == 0
