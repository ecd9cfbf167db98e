"""Programs of a policy against a row's tests: right ones pass, and no trick of those that optimise the reward does."""

from __future__ import annotations

import json
import sys
import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.user_code.code_reward import code
from millrace.core.errors import ConfigError, DataError
from millrace.core.hooks.protocols import RewardInput, RewardResult
from tests.support.slow_members import slow_but

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
PATIENT: dict[str, Any] = {"timeout_s": 60, "total_s": 300}
STDIN = {"tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 7\n", "output": "12"}]}
CALLS = {
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [5, 7]], "outputs": [3, [12]]}),
}
HUMAN_EVAL = {
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    for a in range(4):\n"
    "        assert candidate(a, a) == 2 * a\n    assert abs(candidate(0.5, 0.25) - 0.75) < 1e-6\n",
}
MBPP = {
    "test_list": ["assert add(1, 2) == 3", "assert set(add([1], [2])) == {1, 2}"],
    "test_imports": ["import math"],
}
FORMS = {"stdin": STDIN, "calls": CALLS, "human_eval": HUMAN_EVAL, "mbpp": MBPP}
PROGRAM = "a, b = map(int, input().split())\nprint({})"
FUNCTION = "def add(a, b):\n    return {}"


def scored(program: str, metadata: dict[str, Any], **options: Any) -> RewardResult:
    response = f"Let me think.\n```\nnot this\n```\nSo:\n```python\n{program}\n```\nDone."
    return code(RewardInput("", response, metadata=metadata), **PATIENT | options)


@pytest.mark.parametrize("form", FORMS)
def test_right_code_passes_and_wrong_code_does_not(form: str) -> None:
    program = PROGRAM if form == "stdin" else FUNCTION
    right = scored(program.format("a + b"), FORMS[form])
    assert right.reward == 1.0
    assert right.parts["passed"] == right.parts["tests"]
    assert scored(program.format("a * 3"), FORMS[form]).reward == 0.0


HACKS = {
    "ends with success": "import os\nos._exit(0)",
    "leaves with success": "import sys\nsys.exit(0)",
    "prints success": "print('PASSED', 'OK', '3', '12', flush=True)\nimport os\nos._exit(0)",
    "equals everything": "class All:\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 0\n"
    "    __sub__ = __rsub__ = __abs__ = lambda *a: 0\n    __lt__ = __le__ = __gt__ = __ge__ = lambda *a: True\n"
    "    __iter__ = lambda s: iter(())\n    __str__ = __repr__ = lambda s: '4'\n"
    "def add(*a):\n    return All()\nprint(All())",
    "a number that equals everything": "class All(int):\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\n"
    "    __hash__ = lambda s: 0\n    __sub__ = lambda *a: 0\ndef add(*a):\n    return All(-1)",
    "redefines what tests use": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.set = lambda x=(): {1, 2}\n"
    "builtins.AssertionError = Exception\ndef check(f):\n    pass\ndef add(a, b):\n    return 0",
    "forges the lines of the caller": "import sys\nLINE = '\\x1emillrace '\nreport = LINE + "
    '\'{"asked": {}, "verdicts": ["passed", "passed"], "unsendable": []}\'\n'
    "for out in (sys.__stdout__, sys.stdout):\n    print(report, file=out, flush=True)\n"
    "    for i in range(9):\n        print(LINE + f'{i} {{\"value\": true}}', file=out, flush=True)\nimport os\nos._exit(0)",
    "raises what asserts raise": "def add(*a):\n    raise AssertionError\nraise SystemExit(0)",
    "looks for expected values": "import gc, sys, os\nfound = []\n"
    "for thing in gc.get_objects():\n    if isinstance(thing, dict) and ('expected' in thing or 'sources' in thing):\n"
    "        found.append(thing)\nframe = sys._getframe()\nwhile frame:\n"
    "    found += [v for k, v in frame.f_locals.items() if k in ('expected', 'sources', 'outputs', 'tests')]\n"
    "    frame = frame.f_back\nos.lseek(0, 0, 0)\ntext = os.read(0, 1 << 16).decode()\n"
    "assert found or 'assert' in text or 'output' in text\nprint(found)\ndef add(*a):\n    return found[0]",
    "a value of another process": "def add(*a):\n    return lambda: 3",
    "deep results": "def add(*a):\n    x = []\n    for _ in range(900):\n        x = [x]\n    return x",
    "not a number": "def add(*a):\n    return float('nan')\nprint('nan')",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hack", HACKS)
def test_tricks_pass_no_test(form: str, hack: str) -> None:
    result = scored(HACKS[hack], FORMS[form], score="share")
    assert result.reward == result.parts["passed"] == 0.0


VERDICT = 'VERDICT = \'\\n\\x1emillrace {"asked": {}, "verdicts": ["passed"], "unsendable": []}\\n\' + \'x\' * 10_000\n'
PRINTED = {
    "a row prints a result": "print(add(1, 2))\nassert add(1, 2) == 3",
    "a row prints more than is kept": "for _ in range(9):\n    print(add(1, 2))\nassert add(1, 2) == 3",
    "a row prints a result and never ends": "print(add(1, 2))\nassert sum(range(add(2, 2))) == 6",
}


@pytest.mark.parametrize("printed", PRINTED)
def test_what_asserts_print_is_no_verdict(printed: str) -> None:
    """A result that reads like a report was taken for one, where the true one came too late or not at all."""
    answer = f"{VERDICT}def add(a, b):\n    return VERDICT if a == 1 else 10 ** 12"
    result = scored(answer, {"test_list": [PRINTED[printed]]}, timeout_s=2)
    assert result.reward == result.parts["passed"] == 0.0


BAD_ENDS = {
    "it never ends": ("import time\ntime.sleep(1000)", "timed_out"),
    "it fills the output": ("import os\nwhile True:\n    os.write(1, b'x' * 60000)", "too_much_output"),
    "it ends by a signal": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "raised"),
    "it ends with another code than 0": ("import os\nos._exit(3)", "raised"),
}


@pytest.mark.parametrize(
    ("end", "form"),
    slow_but(
        product(BAD_ENDS, ["calls", "human_eval", "mbpp"]),
        *[("it never ends", "calls"), ("it fills the output", "human_eval")],
        *[("it ends by a signal", "mbpp"), ("it ends with another code than 0", "mbpp")],
    ),
)
def test_results_of_a_process_that_does_not_end_well_pass_nothing(form: str, end: str) -> None:
    """Right results count only with the end of the process that gave them."""
    program, part = BAD_ENDS[end]
    at_exit = "import atexit\n@atexit.register\ndef end():\n" + textwrap.indent(program, "    ")
    answer = f"{at_exit}\n{FUNCTION.format('a + b')}"
    result = scored(answer, FORMS[form], timeout_s=2, score="share")
    assert result.reward == result.parts["passed"] == 0.0
    assert result.parts[part] == result.parts["tests"]


def test_what_an_answer_reads_of_its_process_shows_nothing_that_is_expected() -> None:
    spy = "import os\nos.lseek(0, 0, 0)\ntext = os.read(0, 1 << 16).decode()\n"
    shown = "def add(a, b):\n    assert 'secret' not in text + repr(globals())\n    return 'secret'[0:0] + 'wrong'"
    metadata = {"entry_point": "add", "test": "def check(f):\n    assert f(1, 2) == 'the secret'\n"}
    assert scored(spy + shown, metadata).parts["wrong"] == 1


def test_an_answer_sees_no_file_of_the_host(tmp_path: Path) -> None:
    from millrace.connectors.user_code.sandbox import protections

    if not protections().reads:
        pytest.skip("this kernel cannot hold it back")
    (tmp_path / "answers.txt").write_text("3")
    program = f"print(open({str(tmp_path / 'answers.txt')!r}).read())"
    assert scored(program, {"tests": [{"input": "", "output": "3"}]}).parts["raised"] == 1


@pytest.mark.parametrize(
    ("program", "options", "part"),
    [
        ("while True:\n    pass", {"timeout_s": 1}, "timed_out"),
        ("x = 'x' * (1 << 30)", {"memory_mb": 128}, "out_of_memory"),
        ("while True:\n    print('x' * 1000)", {"output_bytes": 1000}, "too_much_output"),
        ("1 / 0", {}, "raised"),
        ("no python", {}, "raised"),
        ("print(4)", {}, "wrong"),
        ("print(3)\nraise SystemExit(1)", {}, "raised"),
    ],
)
def test_each_end_has_its_part(program: str, options: dict[str, Any], part: str) -> None:
    result = scored(program, STDIN, **options)
    assert result.reward == 0.0
    assert result.parts[part] == 1
    assert sum(result.parts[name] for name in result.parts if name not in ("tests", part)) == 0


@pytest.mark.parametrize("form", ["calls", "mbpp"])
@pytest.mark.parametrize(
    ("body", "part"), [("while True:\n        pass", "timed_out"), ("return 'x' * (1 << 30)", "raised")]
)
def test_a_function_that_takes_too_much_passes_nothing(form: str, body: str, part: str) -> None:
    result = scored(f"def add(a, b):\n    {body}", FORMS[form], timeout_s=3)
    assert result.reward == result.parts["passed"] == 0.0
    assert form == "mbpp" or result.parts[part] == 1


def test_the_share_counts_each_test_and_all_stops_at_the_first_that_fails() -> None:
    program = "a, b = map(int, input().split())\nprint(12)"
    shared = scored(program, STDIN, score="share")
    assert (shared.reward, shared.parts["passed"], shared.parts["wrong"]) == (0.5, 1, 1)
    every = scored(program, STDIN)
    assert (every.reward, every.parts["passed"], every.parts["wrong"]) == (0.0, 0, 1)
    assert scored("print(3)", STDIN, max_tests=1).reward == 1.0
    half = scored("def add(a, b):\n    return a + b if a == 1 else []", MBPP, score="share")
    assert half.reward == 0.5


def test_when_the_time_for_all_is_over_the_rest_has_timed_out() -> None:
    slow = "import time\ntime.sleep(2)\nprint(3)"
    result = scored(slow, STDIN, score="share", total_s=3)
    assert result.parts["timed_out"] >= 1
    assert result.reward <= 0.5


HUGE = 10**5000 + 3  # of more digits than Python writes by default


@pytest.mark.parametrize(
    ("program", "metadata"),
    [
        ("print(10**5000 + 3)", {"tests": [{"input": "", "output": "1" + "0" * 4999 + "3"}]}),
        ("print(int(input()) % 7)", {"tests": [{"input": "1" + "0" * 4999 + "3", "output": str(HUGE % 7)}]}),
        (
            "def f(n):\n    return n + 1",
            {"input_output": {"fn_name": "f", "inputs": [[HUGE]], "outputs": [HUGE + 1]}},
        ),
        (
            "def f(n):\n    return 10**n",
            {"test_list": ["assert f(5000) == 10**5000", "assert len(str(f(5000))) == 5001"]},
        ),
        (
            "def f(n):\n    return str(n)",
            {"entry_point": "f", "test": "def check(c):\n    assert len(c(10**6000)) == 6001\n"},
        ),
    ],
)
def test_integers_of_any_length_are_read_and_written(program: str, metadata: dict[str, Any]) -> None:
    limit = sys.get_int_max_str_digits()
    assert scored(program, metadata).reward == 1.0
    assert sys.get_int_max_str_digits() == limit


@pytest.mark.parametrize(
    ("outputs", "returned", "reward"),
    [
        ([3], "3", 1.0),
        ([[3]], "3", 1.0),  # APPS may wrap
        ([[3]], "[3]", 1.0),
        ([[3, 4]], "3", 0.0),
        ([[3, 4]], "[3, 4]", 1.0),
        ([[[3, 4]]], "[3, 4]", 1.0),
        ([[3], [3, 4]], "3", 0.0),  # results are lists
        ([[3], []], "3", 0.0),
        ([["a", "b"]], "'a'", 0.0),
        ([[True]], "1", 0.0),
        ([[[3], [4]]], "[3]", 0.0),
    ],
)
def test_the_first_of_a_list_is_not_the_list(outputs: list[Any], returned: str, reward: float) -> None:
    tests = {"fn_name": "f", "inputs": [[0]] * len(outputs), "outputs": outputs}
    program = f"def f(n):\n    return {returned}"
    assert scored(program, {"input_output": tests}).reward == reward


def test_a_response_without_a_closed_block_has_no_code() -> None:
    for response in ("print(3)", "```python\nprint(3)\n", ""):
        result = code(RewardInput("", response, metadata=STDIN))
        assert (result.reward, result.parts["no_code"], result.parts["tests"]) == (0.0, 1.0, 2.0)


def test_methods_exceptions_and_values_of_python_come_across() -> None:
    tests = [
        "assert f((1, 'a'), {2: {3}}) == ((1, 'a'), {2: {3}})",
        "assert list(g(3)) == [0, 1, 2]",
        "assert f(*[1], b=b'x') == (1, b'x')",
        "try:\n    f(-1, 0)\n    assert False, 'it raised nothing'\nexcept ValueError:\n    pass",
        "assert f(f(1, 2), 3) == ((1, 2), 3)",
    ]
    program = (
        "class Solution:\n    def f(self, a, b):\n        if a == -1:\n            raise ValueError\n        return a, b\n"
        "def g(n):\n    yield from range(n)"
    )
    result = scored(program, {"test_list": tests}, score="share")
    assert result.reward == 1.0


def test_calls_in_the_form_of_livecodebench() -> None:
    metadata = {
        "tests": json.dumps([{"input": '[1, 2]\n"x"', "output": '{"x": [1, 2]}'}]),
        "fn_name": "pair",
    }
    assert scored("def pair(a, b):\n    return {b: tuple(a)}", metadata).reward == 1.0
    assert scored("def pair(a, b):\n    return {b: a, 'y': 1}", metadata).reward == 0.0


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "it has none of tests, input_output, test_list, test"),
        ({"tests": [{"input": "1"}]}, "metadata.tests of the row: it is no list of mappings"),
        ({"tests": "[oops"}, "metadata.tests of the row: it is not JSON"),
        (
            {"input_output": {"inputs": ["1"], "outputs": []}},
            "metadata.input_output of the row: it has no inputs and",
        ),
        ({"test_list": [1]}, "metadata.test_list of the row: it is no list of text"),
        ({"test": "assert f(1)"}, "metadata.test of the row: test and entry_point are text"),
        ({"test_list": ["assert f(1 =="]}, "unusable"),
        ({"test_list": ["assert True"]}, "they call no function of the answer"),
        ({"test_list": ["class P:\n    pass\nassert f(P())"]}, "they pass a P, which cannot be sent"),
    ],
)
def test_rows_whose_tests_cannot_be_used_are_named(metadata: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        scored("def f(x):\n    return x", metadata)
    assert "row" in caught.value.remedy or "column" in caught.value.remedy


def test_an_unknown_score_is_named() -> None:
    with pytest.raises(ConfigError, match="score = most is not a choice"):
        scored("print(3)", STDIN, score="most")


LINE_OF_F = {"fenced": False, "template": "def add(a, b):\n    return {code}\n"}


@pytest.mark.parametrize(
    ("response", "options", "reward", "part"),
    [
        (" a + b\n", LINE_OF_F, 1.0, "passed"),
        ("a - b", LINE_OF_F, 0.0, "wrong"),
        ("a +", LINE_OF_F, 0.0, "raised"),
        (" \n", LINE_OF_F, 0.0, "no_code"),
        ("```\na + b\n```", LINE_OF_F, 0.0, "raised"),
        ("```\na + b\n```", LINE_OF_F | {"fenced": True}, 1.0, "passed"),
        ("def add(a, b):\n    return int(math.fsum([a, b]))", {"fenced": False}, 0.0, "raised"),
        (
            "def add(a, b):\n    return int(math.fsum([a, b]))",
            {"fenced": False, "template": "import math\n{code}"},
            1.0,
            "passed",
        ),
    ],
)
def test_a_template_stands_around_the_code(
    response: str, options: dict[str, Any], reward: float, part: str
) -> None:
    result = code(RewardInput("", response, metadata=CALLS), **PATIENT | options)
    assert result.reward == reward
    assert result.parts[part] >= 1


def test_a_template_without_a_place_for_the_code_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"options.template of code: it has no place for the code"):
        code(RewardInput("", "x", metadata=CALLS), template="import math")
