"""Verdicts of the reward `math`, and where it looks for the final answer."""

import pytest

from rollout_server.rewards.final_answer import final_answer
from rollout_server.rewards.math_answer import math_answer
from rollout_server.rewards.outcome import RewardItem

PUNCTURED = r"$(-\infty,3)\cup(3,\infty)$"
POLYNOMIAL = "+".join(f"{k + 1}t^{{{k}}}" for k in range(21, 0, -1))
WORKING = "First 40 + 5*9 = 85, that fits!\nSo **36** are left.\n\n---\n\nFinal Answer: **36**"


def verdict(label: str, response: str) -> float:
    return math_answer(RewardItem(r"Example: \boxed{23}", response, label, {}))


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("36", WORKING, 1),
        ("36", WORKING.replace("36", "85"), 0),
        ("36", r"\boxed{85}, no: \boxed{36}", 1),
        ("85", r"\boxed{85}, no: \boxed{36}", 0),
        ("36", r"a draft: \boxed{36}. Once more: \boxed{", 0),
        ("36", r"a draft: \boxed{36}. Once more: \boxed{}", 0),
        ("36", r"a draft: \boxed{36}. Once more: \box", 0),
        ("36", r"\boxed{36}. Once more: \boxed{\frac{7}{2}", 0),
        ("36", "<think>it must be \\boxed{36}", 0),
        ("36", "<think>\\boxed{35}?</think> It is \\boxed{36}.", 1),
        ("63", "7*9=63\n#### 63\n" + "The check above says so too. " * 25, 1),
        ("63", "#### Step 1: 7*9 is 64\n\nthe answer is 63", 1),
        ("23", "No idea.", 0),
        ("23", "", 0),
    ],
)
def test_the_stated_final_answer_counts_and_nothing_before_it(label: str, response: str, value: float) -> None:
    assert verdict(label, response) == value


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("3*u-v+4=0", "The line is 7u + v - 5 = 0", 0),
        ("3*u-v+4=0", "The line is 3u - v + 4 = 0.", 1),
        ("3*u-v+4=0", "so it is -6u + 2v = 8 in all", 1),
        ("$3u-v+4=0$", r"The line is \boxed{9u-3v+12=0}", 1),
        ("$3u-v+4=0$", r"The line is $9u-3v+13=0$.", 0),
        ("$3u-v+4=0$", r"\boxed{0}", 0),
        ("$v=3u+4$", r"\boxed{3u-v+4=0}", 1),
        ("$v=3u+4$", r"\boxed{3u+4}", 0),
        ("u=8", r"\boxed{8}", 1),
        ("8", r"\boxed{u = 8}", 1),
        (PUNCTURED, r"\boxed{(3,\infty)\cup(-\infty,3)}", 1),
        (PUNCTURED, r"\boxed{u\neq 3}", 1),
        (PUNCTURED, r"\boxed{u\neq 4}", 0),
        (PUNCTURED, r"\boxed{(-\infty,\infty)}", 0),
        (PUNCTURED, r"\boxed{\{2,4\}}", 0),
        ("$u>3$", r"\boxed{(3,\infty)}", 1),
        (f"${POLYNOMIAL}$", rf"Hence \boxed{{{POLYNOMIAL}}}", 1),
        (f"${POLYNOMIAL}$", rf"Hence \boxed{{{POLYNOMIAL.replace('9t', '8t', 1)}}}", 0),
    ],
)
def test_equations_sets_and_long_formulas_are_compared_as_such(label: str, response: str, value: float) -> None:
    assert verdict(label, response) == value


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("45", r"\boxed{45.0}", 1),
        ("45.0", r"\boxed{45}", 1),
        (str(2**53 + 3), rf"\boxed{{{2**53 + 4}}}", 0),
        (str(2**80), rf"\boxed{{{2**80}}}", 1),
        ("5/8", r"\boxed{\dfrac{5}{8}}", 1),
        (r"\frac{5}{8}", r"\boxed{0.625}", 1),
        ("2,345", r"\boxed{2345}", 1),
        ("-9", "The answer is \u22129.", 1),
        ("24", r"\boxed{4!}", 1),
        ("(2,7)", r"\boxed{(7,2)}", 0),
        ("Friday", r"\boxed{\text{Friday}}", 1),
        ("Friday", r"\boxed{Fridya}", 0),
        ("Friday", "The answer is Friday.", 1),
        ("Friday", "The answer is Sunday, not Friday.", 0),
        ("C", r"\boxed{C}", 1),
        ("C", "the answer is (D)", 0),
    ],
)
def test_values_and_words_are_equal_however_they_are_written(label: str, response: str, value: float) -> None:
    assert verdict(label, response) == value


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        ("0.0000012", r"\boxed{0.0000013}", 0),
        ("0.0000012", r"\boxed{1.2\times 10^{-6}}", 1),
        ("0.00001", r"\boxed{0.00001}", 1),
        ("0.00001", r"\boxed{e-5}", 0),
        ("1e-05", r"\boxed{0.00001}", 1),
        ("1e-05", r"\boxed{e-5}", 0),
        ("1e3", r"\boxed{1000}", 1),
        ("1000", r"\boxed{1e3}", 1),
        ("1/7", r"\boxed{0.142857}", 1),
        ("1/7", r"\boxed{0.14}", 0),
        ("0.142857", r"\boxed{\frac{1}{7}}", 1),
        ("2/3", r"\boxed{0.666666}", 1),
        ("123456.7", r"\boxed{123456.8}", 0),
        ("3.14159265", r"\boxed{\pi}", 1),
        (r"\pi", r"\boxed{3.14159}", 1),
        (r"\pi", r"\boxed{3.14}", 0),
        (r"\pi", r"\boxed{\frac{355}{113}}", 0),
        (r"\sqrt{2}", r"\boxed{\frac{\sqrt{8}}{2}}", 1),
        (r"\sqrt{2}", r"\boxed{1.41421}", 1),
        (r"\frac{1}{3}+10^{-9}", r"\boxed{\frac{1}{3}}", 0),
        (r"\frac{\pi}{7}", r"\boxed{0.142857\pi}", 1),
        (r"\{\frac{1}{7},2\}", r"\boxed{\{2,0.142857\}}", 1),
        (r"\{0.0000012,2\}", r"\boxed{\{2,0.0000013\}}", 0),
        (r"(0,\frac{1}{3}]", r"\boxed{(0,0.333333]}", 1),
        (r"(0,\frac{1}{3}]", r"\boxed{(0,\frac{1}{3})}", 0),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", 1),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}", 0),
        (r"50\%", r"\boxed{50}", 1),
        (r"50\%", r"\boxed{0.5}", 1),
        ("0.5", r"\boxed{50\%}", 1),
        (r"50\%", r"\boxed{5}", 0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        ("3+2i", r"\boxed{2i+3}", 1),
    ],
)
def test_exact_values_are_equal_exactly_and_decimals_by_digits(label: str, response: str, value: float) -> None:
    assert verdict(label, response) == value


@pytest.mark.parametrize(
    ("label", "response", "value"),
    [
        (r"\$20", r"\boxed{20}", 1),
        (r"$\$20$", r"\boxed{\$20}", 1),
        ("$20", r"\boxed{20.00}", 1),
        ("20", r"\boxed{\$20}", 1),
        (r"\$03", r"\boxed{3}", 1),
        ("\u20ac1,250.50", r"\boxed{1250.5}", 1),
        ("-5", "\\boxed{\u20135}", 1),
        ("-5", "\\boxed{\u22125}", 1),
        ("-5", "\\boxed{\uff0d5}", 1),
        ("-5", "\\boxed{\u20145}", 1),
        ("42", "\\boxed{\uff14\uff12}", 1),
        ("42", "\\boxed{\u0664\u0662}", 1),
        ("1000000", "\\boxed{1\u2009000\u2009000}", 1),
        ("1000000", r"\boxed{1\,000\,000}", 1),
        ("1000000", r"\boxed{1{,}000{,}000}", 1),
        ("0.5", r"\boxed{.5}", 1),
        (".5", r"\boxed{\frac12}", 1),
        (r"\mathrm{e}", r"\boxed{e}", 1),
        ("e", r"\boxed{\mathrm{e}}", 1),
        (r"$\mathrm{e}^{2}$", r"\boxed{e^2}", 1),
        (r"$2\mathrm{i}$", r"\boxed{2i}", 1),
        (r"2\pi", "\\boxed{2\u03c0}", 1),
        (r"5\text{ cm}", r"\boxed{5}", 1),
    ],
)
def test_numbers_money_and_constants_as_models_write_them(label: str, response: str, value: float) -> None:
    assert verdict(label, response) == value


@pytest.mark.parametrize(
    "label",
    [
        r"$3+\unknowncmd{4}$",
        r"$5\quad\text{and more}$",
        "3 apples and 4 pears",
        "2x+",
        "((3)",
        "3..4",
        r"$\sqrt{2$",
        r"x^2+y^2=1 \text{ where } x>0",
    ],
)
def test_I11_a_label_of_which_a_part_is_not_understood_is_an_error(label: str) -> None:
    with pytest.raises(ValueError, match="cannot read the label"):
        verdict(label, r"\boxed{3}")


@pytest.mark.parametrize("answer", [r"3+\unknowncmd{4}", "3..4", "(3"])
def test_an_answer_of_which_a_part_is_not_understood_is_wrong(answer: str) -> None:
    assert verdict("3", rf"\boxed{{{answer}}}") == 0


@pytest.mark.parametrize(
    ("begun", "response", "value"),
    [
        ("<think>\n", "it is \\boxed{36}", 0),
        ("<think>\n", "it is \\boxed{35}</think> So \\boxed{36}", 1),
        ("<think>\n\n</think>\n", "it is \\boxed{36}", 1),
        ("The answer is \\boxed{3", "6}.", 1),
        ("", "it is \\boxed{36}", 1),
    ],
)
def test_what_the_prompt_has_begun_belongs_to_what_is_graded(begun: str, response: str, value: float) -> None:
    assert math_answer(RewardItem("", response, "36", {}, begun)) == value


@pytest.mark.parametrize(
    "answer",
    [r"(10^{7})!", r"7^{7^{7^{7}}}", "2^{99999999}", "123456!", r"\int_0^{2}\cos(u^{u^{u}})du", "3!!!", "u^2" * 900],
)
def test_what_nobody_could_evaluate_is_wrong_at_once(answer: str) -> None:
    assert verdict("4", rf"\boxed{{{answer}}}") == 0
    assert verdict("4", f"the answer is ${answer}$") == 0


def test_working_that_is_hard_to_evaluate_does_not_hide_the_answer() -> None:
    working = r"We need $\int_0^1 2u\,du$, which is far below $9^{9^{9^{9}}}$ and 2^123456."
    assert verdict("1", rf"{working} The answer is $1$.") == 1
    assert verdict("1", rf"{working} So $\int_0^1 2u\,du = 1$.") == 1
    assert verdict("2", rf"{working} The answer is $1$.") == 0


@pytest.mark.parametrize("label", ["", "??"])
def test_I11_a_label_that_is_no_mathematics_is_an_error(label: str) -> None:
    with pytest.raises(ValueError, match="cannot read the label"):
        verdict(label, r"\boxed{4}")


def test_I11_a_missing_label_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a label"):
        math_answer(RewardItem("", "4", None, {}))


def test_an_answer_is_the_whole_text_of_its_box() -> None:
    responses = [r"\boxed{264}", "No idea, sorry.", "", r"\boxed5", r"\fbox{\frac{1}{\{2\}}}", "#### **1,250**."]
    found = [final_answer(each) for each in responses]
    assert [each and (each.text, each.stated) for each in found] == [
        ("264", True),
        ("No idea, sorry.", False),
        None,
        ("5", True),
        (r"\frac{1}{\{2\}}", True),
        ("1,250", True),
    ]
