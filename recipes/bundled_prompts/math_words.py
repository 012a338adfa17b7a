"""Word problems in two or three steps, answered sentence by sentence with a last line `#### N`."""

import random
import re
from collections.abc import Callable

from bundled_prompts.example import NAMES, Example, equations_hold

THINGS = (
    "marbles stickers cards books apples pencils coins shells stamps cookies balloons beads photos magnets "
    "oranges peaches candles ribbons badges toys"
).split()
PACKS = ("bags", "boxes", "packs", "jars", "baskets", "bundles")
_FINAL = re.compile(r"####\s*(-?\d+)\s*$")


def _events(rng: random.Random) -> tuple[str, list[str], int, str]:
    """Somebody has things, then two or three events change how many."""
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    total = rng.randint(5, 60)
    content = [thing, str(total)]
    story = rng.choice(
        (
            f"{name} has {total} {thing}.",
            f"{name} starts with {total} {thing}.",
            f"At first {name} has {total} {thing}.",
            f"There are {total} {thing} in {name}'s collection.",
            f"{name} owns {total} {thing}.",
        )
    )
    steps = []
    sentences = [story]
    for _ in range(rng.choice((2, 2, 3))):
        kinds = ["gain", "packs"]
        if total > 6:
            kinds += ["lose", "lose"]
        if total > 15:
            kinds.append("give_each")
        if total % 2 == 0 and total > 8:
            kinds.append("half")
        if total <= 40:
            kinds.append("double")
        kind = rng.choice(kinds)
        if kind == "gain":
            n = rng.randint(2, 40)
            verb, past = rng.choice(
                (
                    (f"buys {n} more", "buying"),
                    (f"finds {n} more", "finding"),
                    (f"gets {n} more from {other}", "getting"),
                    (f"wins {n} more", "winning"),
                )
            )
            sentences.append(f"{rng.choice(('Then', 'Later', 'Next'))} {name} {verb}.")
            steps.append(f"After {past} {n} more, {name} has {total} + {n} = {total + n} {thing}.")
            total += n
        elif kind == "lose":
            n = rng.randint(2, min(total - 2, 40))
            verb, past = rng.choice(
                (
                    (f"gives {n} to {other}", "giving away"),
                    (f"loses {n} of them", "losing"),
                    (f"sells {n} of them", "selling"),
                    (f"gives away {n} of them", "giving away"),
                )
            )
            sentences.append(f"{rng.choice(('Then', 'Later', 'Next'))} {name} {verb}.")
            steps.append(f"After {past} {n}, {name} has {total} - {n} = {total - n} {thing}.")
            total -= n
        elif kind == "packs":
            m, n = rng.randint(2, 9), rng.randint(2, 9)
            pack = rng.choice(PACKS)
            verb = rng.choice(("buys", "gets", "is given"))
            sentences.append(f"{name} {verb} {m} {pack} with {n} {thing} in each.")
            steps.append(
                f"The {pack} hold {m} * {n} = {m * n} {thing}, so there are {total} + {m * n} = {total + m * n}."
            )
            n = m * n
            total += n
        elif kind == "give_each":
            m = rng.randint(2, 5)
            n = rng.randint(2, min(9, (total - 2) // m))
            who = rng.choice(("friends", "cousins", "classmates"))
            sentences.append(f"{name} gives {n} {thing} to each of {m} {who}.")
            steps.append(
                f"The {who} get {m} * {n} = {m * n} {thing}, so {total} - {m * n} = {total - m * n} are left."
            )
            n = m * n
            total -= n
        elif kind == "half":
            n = total // 2
            verb = rng.choice(("gives away", "sells", "donates"))
            sentences.append(f"Then {name} {verb} half of the {thing}.")
            steps.append(f"Half of the {thing} is {total} / 2 = {n}, so {n} are left.")
            total = n
        else:
            n = total * 2
            sentences.append(f"Then {name} doubles the number of {thing}.")
            steps.append(f"Doubling gives 2 * {total} = {n} {thing}.")
            total = n
        content += [kind, str(n)]
    question = rng.choice(
        (
            f"How many {thing} does {name} have now?",
            f"How many {thing} does {name} have in the end?",
            f"How many {thing} are there in the end?",
            f"How many {thing} is that in the end?",
        )
    )
    return " ".join([*sentences, question]), steps, total, " ".join(content)


def _shopping(rng: random.Random) -> tuple[str, list[str], int, str]:
    name = rng.choice(NAMES)
    thing, second = rng.sample(("notebooks", "pens", "cakes", "tickets", "scarves", "mugs", "plants", "lamps"), 2)
    a, x, b, y = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 6), rng.randint(2, 9)
    cost, cost2 = a * x, b * y
    text = rng.choice(
        (
            f"{name} buys {a} {thing} at ${x} each and {b} {second} at ${y} each.",
            f"At the market {name} picks {a} {thing} for ${x} each and {b} {second} for ${y} each.",
            f"A shop sells {thing} for ${x} and {second} for ${y}. {name} takes {a} {thing} and {b} {second}.",
        )
    )
    total = cost + cost2
    steps = [
        f"The {thing} cost {a} * {x} = {cost} dollars.",
        f"The {second} cost {b} * {y} = {cost2} dollars.",
        f"Together that is {cost} + {cost2} = {total} dollars.",
    ]
    content = f"shopping {thing} {second} {a} {x} {b} {y}"
    if rng.random() < 0.4 and total < 100:
        steps.append(f"The change from 100 dollars is 100 - {total} = {100 - total} dollars.")
        text += rng.choice(
            (f" How much change does {name} get from $100?", f" {name} pays with $100. How much comes back?")
        )
        return text, steps, 100 - total, content + " change"
    text += rng.choice(
        (" How much is that in total?", f" How many dollars does {name} spend?", " What is the total cost?")
    )
    return text, steps, total, content


def _sharing(rng: random.Random) -> tuple[str, list[str], int, str]:
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    people, each = rng.randint(2, 9), rng.randint(2, 9)
    total = people * each
    first = rng.randint(2, total - 2) if total > 4 else 2
    second = total - first
    who = rng.choice(("children", "friends", "students", "players", "neighbors"))
    text = rng.choice(
        (
            f"{name} has {first} {thing} and {other} has {second}. "
            f"They share all of them equally among {people} {who}.",
            f"{name} brings {first} {thing} and {other} brings {second}. "
            f"Everything is split evenly among {people} {who}.",
            f"{first} {thing} from {name} and {second} from {other} are divided equally among {people} {who}.",
        )
    )
    text += rng.choice((f" How many {thing} does each one get?", f" How many {thing} is that for each of the {who}?"))
    steps = [
        f"Together there are {first} + {second} = {total} {thing}.",
        f"Each of the {people} {who} gets {total} / {people} = {each} {thing}.",
    ]
    return text, steps, each, f"sharing {thing} {first} {second} {people}"


def _rows(rng: random.Random) -> tuple[str, list[str], int, str]:
    place, row, seat = rng.choice(
        (
            ("hall", "rows", "seats"),
            ("theater", "rows", "seats"),
            ("garden", "rows", "plants"),
            ("warehouse", "shelves", "boxes"),
            ("parking lot", "lines", "spaces"),
            ("library", "shelves", "books"),
        )
    )
    m, n = rng.randint(3, 12), rng.randint(3, 12)
    total = m * n
    gone = rng.randint(2, total - 2)
    taken = {"seats": "taken", "plants": "watered", "boxes": "sold", "spaces": "taken", "books": "lent out"}[seat]
    text = rng.choice(
        (
            f"A {place} has {m} {row} with {n} {seat} in each. {gone} of the {seat} are {taken}.",
            f"There are {m} {row} of {n} {seat} in a {place}, and {gone} {seat} are {taken}.",
            f"In a {place} there are {m} {row}, each with {n} {seat}. So far {gone} {seat} are {taken}.",
        )
    )
    text += rng.choice((f" How many {seat} are not {taken}?", f" How many {seat} are still not {taken}?"))
    steps = [
        f"The {place} has {m} * {n} = {total} {seat}.",
        f"Of these, {total} - {gone} = {total - gone} are not {taken}.",
    ]
    return text, steps, total - gone, f"rows {place} {m} {n} {gone}"


def _rates(rng: random.Random) -> tuple[str, list[str], int, str]:
    name = rng.choice(NAMES)
    verb, unit, span = rng.choice(
        (
            ("reads", "pages", "day"),
            ("runs", "miles", "week"),
            ("bakes", "loaves", "hour"),
            ("paints", "tiles", "hour"),
            ("writes", "letters", "week"),
            ("earns", "dollars", "hour"),
            ("plants", "trees", "day"),
        )
    )
    n, m, extra = rng.randint(3, 12), rng.randint(3, 9), rng.randint(4, 40)
    made = n * m
    total = made + extra
    base = {"reads": "read", "runs": "run", "bakes": "bake", "paints": "paint", "writes": "write"}.get(verb, verb[:-1])
    text = rng.choice(
        (
            f"{name} {verb} {n} {unit} every {span} for {m} {span}s and then {extra} more {unit}.",
            f"For {m} {span}s, {name} {verb} {n} {unit} each {span}. After that come {extra} more {unit}.",
            f"Each {span} {name} {verb} {n} {unit}. This goes on for {m} {span}s, "
            f"and {extra} {unit} are added at the end.",
        )
    )
    text += rng.choice((f" How many {unit} does {name} {base} in all?", f" How many {unit} is that in all?"))
    steps = [
        f"In {m} {span}s {name} {verb} {m} * {n} = {made} {unit}.",
        f"With the {extra} more, that is {made} + {extra} = {total} {unit}.",
    ]
    return text, steps, total, f"rates {verb} {n} {m} {extra}"


def _ages(rng: random.Random) -> tuple[str, list[str], int, str]:
    a, b, c = rng.sample(NAMES, 3)
    x, d, f = rng.randint(5, 30), rng.randint(2, 15), rng.randint(2, 15)
    older = x + d
    third = older + f if (up := rng.random() < 0.5) or older - f < 2 else older - f
    up = third > older
    text = (
        f"{a} is {x} years old. {b} is {d} years older than {a}. "
        f"{c} is {f} years {'older' if up else 'younger'} than {b}."
    )
    steps = [
        f"{b} is {x} + {d} = {older} years old.",
        f"{c} is {older} {'+' if up else '-'} {f} = {third} years old.",
    ]
    content = f"ages {x} {d} {f} {up}"
    if rng.random() < 0.5:
        steps.append(f"The sum of the ages of {b} and {c} is {older} + {third} = {older + third}.")
        return text + f" What is the sum of the ages of {b} and {c}?", steps, older + third, content + " sum"
    return text + rng.choice((f" How old is {c}?", f" What is {c}'s age?")), steps, third, content


def _times(rng: random.Random) -> tuple[str, list[str], int, str]:
    a, b = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    n, m = rng.randint(3, 20), rng.randint(2, 5)
    verb = rng.choice(("has", "collects", "owns", "sells"))
    base = {"has": "have", "collects": "collect", "owns": "own", "sells": "sell"}[verb]
    text = f"{a} {verb} {n} {thing}. {b} {verb} {m} times as many."
    big = n * m
    if rng.random() < 0.5:
        steps = [f"{b} {verb} {m} * {n} = {big} {thing}.", f"Together they {base} {n} + {big} = {n + big} {thing}."]
        return text + f" How many {thing} do they {base} together?", steps, n + big, f"times {thing} {n} {m} sum"
    steps = [f"{b} {verb} {m} * {n} = {big} {thing}.", f"That is {big} - {n} = {big - n} more than {a}."]
    return (
        text + f" How many more {thing} does {b} {base} than {a}?",
        steps,
        big - n,
        f"times {thing} {n} {m} difference",
    )


KINDS: tuple[Callable[[random.Random], tuple[str, list[str], int, str]], ...] = (
    _events,
    _events,
    _events,
    _shopping,
    _sharing,
    _rows,
    _rates,
    _ages,
    _times,
)


def make(rng: random.Random, wanted: Callable[[str], bool]) -> Example | None:
    """Draw one word problem, or `None` if its content is not `wanted`."""
    prompt, steps, result, content = rng.choice(KINDS)(rng)
    if not wanted(content):
        return None
    answer = "\n".join([*steps, f"#### {result}"])
    return Example("math", prompt, answer, content, (str(result),))


def check(example: Example, answer: str) -> bool:
    """Return whether the last line is the correct number and all equations above it hold (at least one)."""
    final = _FINAL.search(answer.strip())
    if final is None or final.group(1) != example.key[0]:
        return False
    worked = answer[: answer.rindex("####")]
    return "=" in worked and equations_hold(worked)
