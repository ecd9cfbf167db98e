"""Mathematical answers against labels, as a careful human would judge: tables by kind, each row in both orders."""

from __future__ import annotations

import gc
import json
import threading
import time
from itertools import combinations
from pathlib import Path

import pytest

from millrace.core.hooks.protocols import RewardInput
from millrace.core.rewards.math import answer_of, equal, last_boxed, math
from millrace.core.rewards.symbolic import _limit, _OutOfTime

GRADED = json.loads((Path(__file__).parent / "graded_answers.json").read_text())

# (one, other, whether they are the same)
KINDS: dict[str, list[tuple[str, str, int]]] = {
    "numbers": [
        ("1/3", "0.333333", 0),
        ("1 2", "12", 0),
        ("1 2", "3", 0),
        ("1 2", "2", 0),
        ("1{,}000", "1000", 1),
        ("3e2", "300", 1),
        ("1.2e-3", "0.0012", 1),
        (".5", "0.5", 1),
        ("0.50", "1/2", 1),
        ("-.5", "-1/2", 1),
        ("007", "7", 1),
        (r"-\frac{1}{2}", r"\frac{-1}{2}", 1),
        (r"\frac{1}{-2}", r"-\frac12", 1),
        ("10:30", "10:30", 1),
        ("3:4", "3/4", 1),
        ("3:4", "4:3", 0),
        (r"1\frac{1}{2}", "1.5", 1),
        ("1 1/2", "1.5", 1),
        (r"-1\frac{1}{2}", "-1.5", 1),
        (r"-1\frac12", "-0.5", 0),
        ("", "", 0),
        (" ", "0", 0),
        ("?", "7", 0),
        ("7.", "7", 1),
        ("1.000000001", "1", 0),
        ("0.1+0.2", "0.3", 1),
        (r"\boxed{7}", "7", 1),
    ],
    "constants and functions": [
        (r"\frac{1}{3}\pi", r"\frac{\pi}{3}", 1),
        ("3.14159265", r"\pi", 0),
        (r"\pi", "3.141592653589793", 0),
        ("2(3)", "6", 1),
        ("2(3)", "5", 0),
        ("(2)(3)", "6", 1),
        (r"2\binom{4}{2}", "12", 1),
        (r"\binom{4}{2}", "6", 1),
        (r"\sqrt{50}", r"5\sqrt{2}", 1),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}", 1),
        (r"\sqrt[3]{8}", "2", 1),
        ("8^{1/3}", "2", 1),
        ("2^{10}", "1024", 1),
        (r"\sin(\pi/6)", "1/2", 1),
        (r"\ln(e)", "1", 1),
        (r"\log_{10} 100", "2", 1),
        ("5!", "120", 1),
        ("|{-3}|", "3", 1),
        (r"\lfloor 2.5 \rfloor", "2", 1),
        ("1,000,000", "10^6", 1),
        ("1 000 000", "10^6", 1),
        (r"1.5\times10^{3}", "1500", 1),
        (r"\infty", r"-\infty", 0),
        (r"+\infty", r"\infty", 1),
        (r"\rightarrow", r"\leftarrow", 0),
        (r"\sqrt{2}\cdot 10^{-20}", r"\sqrt{3}\cdot 10^{-20}", 0),
        (r"\frac{\sqrt{3}}{2}", "0.8660254", 0),
        (r"2\sqrt{3}+1", r"1+2\sqrt3", 1),
        (r"\frac{2}{\sqrt{3}-1}", r"\sqrt3+1", 1),
        ("10^{-3}", "0.001", 1),
        (r"\frac{7}{2}\pi", r"3.5\pi", 1),
    ],
    "units": [
        ("2t", "2", 0),
        ("3s", "3", 0),
        ("5 cm", "5", 1),
        ("5cm", "5 centimeters", 1),
        ("5 cm^2", "5 cm", 0),
        (r"5\text{ square centimeters}", r"5\text{ cm}^2", 1),
        (r"5\,\text{m/s}", r"5 \text{ meters per second}", 1),
        (r"\sin 30^\circ", r"\frac12", 0),
        (r"\$5", "5", 1),
        (r"\$1,000", "1000", 1),
        (r"45^\circ", "45", 1),
        (r"45^{\circ}", r"45 \text{ degrees}", 1),
        (r"20^\circ\text{C}", "20", 1),
        ("101_2", "101", 1),
        ("101_2", "101_3", 0),
        ("101_2", "101_{2}", 1),
        (r"5 \text{ or more}", "5", 0),
        (r"\text{5 cm}", "5", 1),
        (r"90\text{ minutes}", "90", 1),
        (r"12\text{ apples}", "12", 1),
        ("12 apples", "12", 1),
    ],
    "percent": [
        (r"50\%", "0.5", 1),
        (r"50\%", "50", 1),
        (r"50\%", r"\frac12", 1),
        (r"50\%", "5", 0),
        ("50", "0.5", 0),
        (r"12.5\%", "1/8", 1),
        ("20%", "20 percent", 1),
    ],
    "equations and chains": [
        ("6=5", "5", 0),
        ("6=5", "6", 0),
        ("2+3=5", "5", 1),
        ("x=2+3=5", "5", 1),
        ("x=2+2=5", "5", 0),
        ("x=5", "y=5", 0),
        ("x=5", "x=5.0", 1),
        ("y=2x+1", "y-2x=1", 1),
        ("y=2x+1", "2x+1", 1),
        ("x+y=5", "5", 1),
        ("x = 5", "5", 1),
        ("x=1,2", "1,2", 1),
        ("x=1,x=2", "1,2", 1),
        (r"x=1 \text{ or } x=2", "1,2", 1),
        ("f(x)=2x", "f(x)=2x", 1),
    ],
    "inequalities and intervals": [
        ("x>3", r"(3,\infty)", 1),
        ("3<x", "x>3", 1),
        (r"x\ge 3", r"[3,\infty)", 1),
        (r"x \in [1,2]", "[1,2]", 1),
        ("1<x<2", "(1,2)", 1),
        (r"1 \le x \le 2", "[1,2]", 1),
        ("1<x<2", "[1,2]", 0),
        ("1<x<2", "1,2", 0),
        ("x=1", "x=1,2", 0),
        (r"x \neq 2", r"x\ne 2", 1),
        (r"x\ne2", "2", 0),
    ],
    "lists, pairs and sets": [
        ("(1,2)", "1,2", 0),
        ("1,2", "2,1", 1),
        (r"\{1,2\}", "1,2", 1),
        ("(1,2)", "(2,1)", 0),
        ("(2,1)", "(2,1.0)", 1),
        ("(1,2,3)", "(1,2,3.0)", 1),
        ("(1,2,3)", "(3,2,1)", 0),
        (r"1 \text{ and } 2", "1,2", 1),
        (r"\pm 3", "3,-3", 1),
        ("5,6", "5", 0),
        ("5 or 6", "5", 0),
        (r"5 \text{ or } 6", "5,6", 1),
        (r"\emptyset", r"\{\}", 1),
        (r"\varnothing", r"\emptyset", 1),
        (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)", 1),
        (r"\mathbb{R}", r"(-\infty,\infty)", 1),
        (r"[1,2]\cup[2,3]", "[1,3]", 1),
        (r"\{x | x>2\}", "x>2", 0),
    ],
    "letters": [
        ("3+4i", "4i+3", 1),
        ("3+4i", "3-4i", 0),
        ("i", "-i", 0),
        ("(x+1)(x-1)", "x^2-1", 1),
        ("x^2-1", "x^2+1", 0),
        (r"\frac{x^2-1}{x-1}", "x+1", 1),
        ("a b", "b a", 1),
        (r"\sin^2 x+\cos^2 x", "1", 1),
        (r"\tan x", r"\frac{\sin x}{\cos x}", 1),
        ("2x", "2y", 0),
        ("n(n+1)/2", r"\frac{n^2+n}{2}", 1),
        ("x^{2}", "x^2", 1),
        ("x_1", "x_{1}", 1),
        (r"\frac{3}{4}x", "0.75x", 1),
    ],
    "matrices": [
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", 1),
        (r"\begin{pmatrix}\frac12\\3\end{pmatrix}", r"\begin{pmatrix}0.5\\3\end{pmatrix}", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", 0),
    ],
    "words and choices": [
        ("A", "a", 1),
        ("A", "B", 0),
        ("(A)", "A", 1),
        (r"\text{A}", "A", 1),
        (r"\textbf{(B)}", "B", 1),
        (r"(B)\ 5", "B", 1),
        ("yes", r"\text{yes}", 1),
        (r"\text{Yes}", "yes", 1),
        ("no", "yes", 0),
        ("Monday", r"\text{Monday}", 1),
        (r"\text{}", "0", 0),
        (r"7\text{.}", "7", 1),
    ],
}


@pytest.mark.parametrize(
    ("response", "label", "score"), GRADED, ids=[f"{r[0][:40]} {r[1][:20]}" for r in GRADED]
)
def test_a_careful_human_agrees(response: str, label: str, score: int) -> None:
    assert math(RewardInput(prompt="?", response=response, label=label)).reward == score


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_in_both_orders(kind: str) -> None:
    found = [(one, other, int(equal(one, other)), int(equal(other, one))) for one, other, _ in KINDS[kind]]
    assert found == [(one, other, same, same) for one, other, same in KINDS[kind]]


def test_equal_does_not_depend_on_the_order() -> None:
    corpus = sorted({text for rows in KINDS.values() for one, other, _ in rows[::4] for text in (one, other)})
    assert len(corpus) > 50
    pairs = list(combinations(corpus, 2))[::7]
    assert [pair for pair in pairs if equal(*pair) != equal(*reversed(pair))] == []


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("3/4 of 12 is 9", "9"),
        ("it is 3/4.", "3/4"),
        ("on 1/2/2024", "2024"),
        ("so x-1/2", "1/2"),
        ("between 7-3", "3"),
        ("x = -3", "-3"),
        (r"it is -\frac{1}{2}", r"-\frac{1}{2}"),
        ("about 50%, then", "50%"),
        ("1,234, or so", "1,234"),
        ("none", None),
    ],
)
def test_without_a_box_the_last_number_is_the_answer(response: str, answer: str | None) -> None:
    assert answer_of(response) == answer


def test_boxes_that_never_close_cost_one_pass() -> None:
    assert last_boxed(r"\boxed{1} " + r"\boxed{" * 100_000) == "1"
    assert last_boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert last_boxed(r"\boxed{\boxed{7}}") == "7"


def test_a_label_of_gsm8k_is_what_follows_its_mark() -> None:
    label = "Natalia sold 48/2 = 24 clips in May.\n#### 72"
    assert math(RewardInput(prompt="?", response=r"\boxed{72}", label=label)).reward == 1


def test_what_other_threads_compute_does_not_count_against_a_comparison() -> None:
    over = threading.Event()

    def busy() -> None:
        while not over.is_set():
            pass

    others = threading.Thread(target=busy)
    others.start()
    try:
        with _limit(0.02):
            time.sleep(0.3)
        with pytest.raises(_OutOfTime), _limit(0.02):
            busy()
    finally:
        over.set()
        others.join()


def test_no_garbage_is_collected_within_a_comparison() -> None:
    """In a large process that takes longer than the comparison, and counts as its time."""
    assert gc.isenabled()
    with _limit(1):
        assert not gc.isenabled()
    assert gc.isenabled()
