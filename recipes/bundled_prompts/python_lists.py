"""Tasks of small Python functions on lists, and their inputs."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A function to write: possible names, parameters, its result in words, its body, and its inputs."""

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    returns: str
    body: list[str]
    inputs: Callable[[random.Random], tuple[Any, ...]]


_LISTS = ("numbers", "nums", "values", "items", "scores", "data", "xs")
TEXT_NAMES = ("text", "s", "word", "line", "message")
SENTENCE_NAMES = ("text", "sentence", "line", "message")
_WORDS = [
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "music",
    "garden",
    "window",
    "pepper",
    "summer",
    "bread",
    "candle",
    "rocket",
    "silver",
    "orange",
    "planet",
    "forest",
    "island",
    "button",
    "ladder",
    "mirror",
    "pencil",
    "rabbit",
    "velvet",
]


def random_numbers(rng: random.Random) -> tuple[Any, ...]:
    return ([rng.randint(-9, 20) for _ in range(rng.randint(4, 5))],)


def random_text(rng: random.Random) -> tuple[Any, ...]:
    return (rng.choice(_WORDS),)


def random_sentence(rng: random.Random) -> tuple[Any, ...]:
    return (" ".join(rng.sample(_WORDS, rng.randint(2, 4))),)


def random_table(rng: random.Random) -> tuple[Any, ...]:
    return ({word: rng.randint(1, 20) for word in rng.sample(_WORDS, 3)},)


def random_integer(rng: random.Random) -> tuple[Any, ...]:
    return (rng.randint(-5, 40),)


def filtered(rng: random.Random) -> Task:
    """Draw a sum, list, count, or maximum of the numbers that meet a condition."""
    k, m = rng.randint(2, 12), rng.randint(2, 9)
    values = rng.choice(_LISTS)
    x = {"numbers": "n", "nums": "n", "values": "v", "items": "i", "scores": "s", "data": "d", "xs": "x"}[values]
    which, condition, tag = rng.choice(
        (
            ("numbers", "", ""),
            ("even numbers", f"{x} % 2 == 0", "even"),
            ("odd numbers", f"{x} % 2 == 1", "odd"),
            ("positive numbers", f"{x} > 0", "positive"),
            ("negative numbers", f"{x} < 0", "negative"),
            (f"numbers greater than {k}", f"{x} > {k}", "large"),
            (f"numbers less than {k}", f"{x} < {k}", "small"),
            (f"numbers of at least {k}", f"{x} >= {k}", "big"),
            (f"numbers of at most {k}", f"{x} <= {k}", "low"),
            (f"numbers divisible by {k}", f"{x} % {k} == 0", "divisible"),
            (f"numbers other than {k}", f"{x} != {k}", "other"),
        )
    )
    change, expression, change_tag = rng.choice(
        (
            ("", x, ""),
            ("", x, ""),
            (", each squared", f"{x} * {x}", "squares"),
            (f", each times {m}", f"{m} * {x}", "multiples"),
            (", each without its sign", f"abs({x})", "abs"),
            (f", each increased by {m}", f"{x} + {m}", "shifted"),
        )
    )
    kind = rng.choice(("sum", "list", "list", "count") if condition else ("sum", "list", "list"))
    if kind == "list" and not condition and not change:
        change, expression, change_tag = ", each squared", f"{x} * {x}", "squares"
    test = f" if {condition}" if condition else ""
    loop = rng.random() < 0.4
    tail = [f"for {x} in {values}:"]
    indent = "    "
    if condition:
        tail.append(f"    if {condition}:")
        indent = "        "
    if kind == "sum":
        returns = f"the sum of the {which} in a list{change}"
        stem = ("sum", "total", "add")
        body = [f"return sum({expression} for {x} in {values}{test})"]
        if loop:
            body = ["total = 0", *tail, f"{indent}total += {expression}", "return total"]
    elif kind == "list":
        returns = f"a list of the {which} in a list{change}"
        stem = ("keep", "select", "list")
        body = [f"return [{expression} for {x} in {values}{test}]"]
        if loop:
            body = ["result = []", *tail, f"{indent}result.append({expression})", "return result"]
    else:
        change_tag = ""
        returns = f"how many {which} are in a list"
        stem = ("count", "number_of", "count")
        body = [f"return sum(1 for {x} in {values}{test})"]
        if loop:
            body = ["count = 0", *tail, f"{indent}count += 1", "return count"]
    name = "_".join(
        part for part in (rng.choice(stem), tag, change_tag or rng.choice(("numbers", "values", "items"))) if part
    )
    return Task((name,), (values,), returns + (", using a loop" if loop else ""), body, random_numbers)


def plain_list(rng: random.Random) -> Task:
    k = rng.randint(2, 4)
    v = rng.choice(_LISTS)
    names, returns, body = rng.choice(
        (
            (
                ("spread", "value_range", "max_gap"),
                "the difference between the largest and the smallest value in a list",
                [f"return max({v}) - min({v})"],
            ),
            (("first_items", "head", "take"), f"the first {k} items of a list", [f"return {v}[:{k}]"]),
            (("last_items", "tail", "take_last"), f"the last {k} items of a list", [f"return {v}[-{k}:]"]),
            (("skip_items", "drop_first", "skip"), f"a list without its first {k} items", [f"return {v}[{k}:]"]),
            (
                ("every_other", "step_through", "thin_out"),
                f"every {k}th item of a list, starting with the first".replace("2th", "2nd").replace("3th", "3rd"),
                [f"return {v}[::{k}]"],
            ),
            (
                ("sort_down", "descending", "rank"),
                "a list sorted from the largest to the smallest",
                [f"return sorted({v}, reverse=True)"],
            ),
            (
                ("sort_up", "ascending", "ordered"),
                "a list sorted from the smallest to the largest",
                [f"return sorted({v})"],
            ),
            (("backwards", "flip", "reverse_list"), "a list in reverse order", [f"return {v}[::-1]"]),
            (
                ("unique_sorted", "distinct", "unique_values"),
                "the distinct values of a list in sorted order",
                [f"return sorted(set({v}))"],
            ),
            (
                ("smallest_items", "lowest", "bottom"),
                f"the {k} smallest values of a list",
                [f"return sorted({v})[:{k}]"],
            ),
            (
                ("largest_items", "top", "best"),
                f"the {k} largest values of a list, largest first",
                [f"return sorted({v}, reverse=True)[:{k}]"],
            ),
            (
                ("running_total", "cumulative", "partial_sums"),
                "the running totals of a list",
                [
                    "total = 0",
                    "result = []",
                    f"for n in {v}:",
                    "    total += n",
                    "    result.append(total)",
                    "return result",
                ],
            ),
            (
                ("differences", "steps_between", "deltas"),
                "the differences between neighboring items of a list",
                [f"return [b - a for a, b in zip({v}, {v}[1:])]"],
            ),
            (
                ("position_of_max", "argmax", "peak_index"),
                "the index of the largest value in a list",
                [f"return {v}.index(max({v}))"],
            ),
            (
                ("position_of_min", "argmin", "low_index"),
                "the index of the smallest value in a list",
                [f"return {v}.index(min({v}))"],
            ),
            (("repeat_list", "tile", "multiply_list"), f"a list repeated {k} times", [f"return {v} * {k}"]),
        )
    )
    return Task(names, (v,), returns, body, random_numbers)
