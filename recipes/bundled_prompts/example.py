"""One prompt of the bundled pair with its reference answer, and shared words of the domains."""

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
    """A prompt of one domain, its reference answer, and the data of its checker.

    Args:
        domain (`str`): one of `DOMAINS`.
        prompt (`str`): the user message, without chat template.
        answer (`str`): a correct answer; `check_answer` accepts other correct ones.
        content (`str`): the problem without its wording. The splits are made by it, so that no problem is in both.
        key (`tuple[str, ...]`): data for the domain's checker.
    """

    domain: str
    prompt: str
    answer: str
    content: str
    key: tuple[str, ...] = ()


def numbers_in(text: str) -> list[float]:
    """Return the unsigned numbers in `text`, in order."""
    return [float(number) for number in _NUMBER.findall(text)]


def equations_hold(text: str) -> bool:
    """Return whether all equations in `text` (such as `3 * $4 = $12`) hold."""
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
