"""One prompt of the bundled pair with its reference answer, and the words that the domains share."""

import re
from dataclasses import dataclass

NAMES = (
    "Maya Tom Nora Ben Lucy Omar Priya Sam Elena Jack Aisha Leo Grace Ivan Mia Noah Rosa Carl Zoe Hugo "
    "Tara Felix Dina Paul Ruth Andre Kim Victor Lena Oscar Jane Yusuf Clara Amir Holly Peter Sofia Marcus Ines Dan"
).split()

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_EQUATION = re.compile(r"([\d\s.$%()+*/-]*\d[\s$%)]*)=\s*\$?(\d+(?:\.\d+)?)")
_TERM = re.compile(r"\d+(?:\.\d+)?%?|[()+*/-]")


@dataclass(frozen=True)
class Example:
    """A prompt of one domain, its reference answer, and what a checker needs.

    Args:
        domain (`str`): one of `DOMAINS`.
        prompt (`str`): the user's turn, without chat template.
        answer (`str`): a right answer; others may be right too, `check_answer` decides.
        content (`str`): the problem without its wording. The train and serve splits are cut by it, so that no
            problem of one split occurs in the other, in whatever words.
        key (`tuple[str, ...]`): what the domain's checker compares with.
    """

    domain: str
    prompt: str
    answer: str
    content: str
    key: tuple[str, ...] = ()


def numbers_in(text: str) -> list[float]:
    """Every unsigned number written in `text`, in order."""
    return [float(number) for number in _NUMBER.findall(text)]


def equations_hold(text: str) -> bool:
    """Whether every equation written in `text` (such as `3 * $4 = $12` or `8 - 2 = 6`) is right."""
    for left, right in _EQUATION.findall(text):
        terms = _TERM.findall(left)
        expression = "".join(f"({term[:-1]}/100)" if term.endswith("%") else term for term in terms)
        if "**" in expression:
            return False
        try:
            # The expression holds nothing but digits, points, parentheses and the four operators.
            value = eval(expression, {"__builtins__": {}})
        except (SyntaxError, TypeError, ZeroDivisionError):
            return False
        if abs(value - float(right)) > 1e-6:
            return False
    return True
