"""Money questions with figures, answered in two or three sentences that show the sums."""

import random
from collections.abc import Callable

from bundled_prompts.example import NAMES, Example, equations_hold, numbers_in

# prompt, answer, the figure asked for, the problem without its wording
Draft = tuple[str, str, int, str]


def _interest(rng: random.Random) -> Draft:
    name = rng.choice(NAMES)
    hundreds, rate, years = rng.randint(2, 20), rng.randint(2, 9), rng.randint(2, 9)
    # A tiny model learns products of two digits by one, not of three.
    hundreds = min(hundreds, 99 // rate)
    principal, yearly = hundreds * 100, hundreds * rate
    total = yearly * years
    place = rng.choice(("a savings account", "a deposit", "a bond", "a fund"))
    prompt = rng.choice(
        (
            f"{name} puts ${principal} into {place} at {rate}% simple interest a year.",
            f"Suppose ${principal} sits in {place} that pays {rate}% simple interest per year.",
            f"I have ${principal} in {place} paying {rate}% simple interest a year.",
            f"{place.capitalize()} pays {rate}% simple interest a year and {name} invests ${principal}.",
        )
    )
    text = f"At {rate}% a year, ${principal} earns ${yearly} of interest each year. "
    if rng.random() < 0.6:
        prompt += rng.choice(
            (f" How much interest is earned in {years} years?", f" What is the interest after {years} years?")
        )
        answer = text + f"Over {years} years the simple interest is {years} * ${yearly} = ${total}."
        return prompt, answer, total, f"interest {principal} {rate} {years}"
    prompt += rng.choice(
        (f" What is the balance after {years} years?", f" How much money is there after {years} years?")
    )
    answer = text + (
        f"In {years} years that is {years} * ${yearly} = ${total}. "
        f"The balance is then ${principal} + ${total} = ${principal + total}."
    )
    return prompt, answer, principal + total, f"balance {principal} {rate} {years}"


def _change(rng: random.Random) -> Draft:
    item = rng.choice(("share", "ticket", "subscription", "coffee machine", "bicycle", "jacket", "fund unit", "phone"))
    base = rng.choice((10, 20, 25, 40, 50, 80, 100, 200, 300, 400, 500))
    unit = {10: 10, 20: 5, 25: 4, 40: 5, 50: 2, 80: 5, 100: 1, 200: 2, 300: 5, 400: 5, 500: 5}[base]
    percent = unit * rng.randint(1, max(1, 60 // unit))
    move = base * percent // 100
    if base * percent % 100:
        return _change(rng)
    up = rng.random() < 0.5
    new = base + move if up else base - move
    verb = rng.choice(("rises", "climbs", "goes up") if up else ("falls", "drops", "goes down"))
    prompt = rng.choice(
        (
            f"The price of a {item} {verb} from ${base} to ${new}. What is the percent change?",
            f"A {item} {verb} from ${base} to ${new}. By how many percent did the price change?",
            f"If a {item} {verb} from ${base} to ${new}, how large is the change in percent?",
        )
    )
    low, high = min(base, new), max(base, new)
    answer = (
        f"The price {verb} by ${high} - ${low} = ${move}. "
        f"Compared with ${base}, that is {percent}%, so the {item} {'gained' if up else 'lost'} {percent}%."
    )
    return prompt, answer, percent, f"change {item} {base} {new}"


def _saving(rng: random.Random) -> Draft:
    name = rng.choice(NAMES)
    goal_item = rng.choice(("laptop", "trip", "camera", "guitar", "sofa", "course", "bike", "wedding gift"))
    monthly, months = rng.randint(2, 20) * 10, rng.randint(3, 12)
    need = monthly * months
    have = rng.randint(1, 20) * 10
    goal = need + have
    if rng.random() < 0.5:
        prompt = rng.choice(
            (
                f"{name} needs ${goal} for a {goal_item} and already has ${have}. "
                f"How much must {name} save each month to get there in {months} months?",
                f"A {goal_item} costs ${goal}. {name} has ${have} and wants to buy it in {months} months. "
                f"How much has to be saved per month?",
            )
        )
        answer = (
            f"{name} still needs ${goal} - ${have} = ${need}. "
            f"Spread over {months} months, that is ${need} / {months} = ${monthly} a month."
        )
        return prompt, answer, monthly, f"save monthly {goal} {have} {months}"
    prompt = rng.choice(
        (
            f"{name} has ${have} and saves ${monthly} a month for a {goal_item}. "
            f"How much money is there after {months} months?",
            f"For a {goal_item}, {name} puts aside ${monthly} every month, starting from ${have}. "
            f"What is saved after {months} months?",
        )
    )
    answer = (
        f"In {months} months {name} puts aside {months} * ${monthly} = ${need}. "
        f"With the first ${have}, the savings are ${have} + ${need} = ${goal}."
    )
    return prompt, answer, goal, f"save total {monthly} {have} {months}"


def _margin(rng: random.Random) -> Draft:
    item = rng.choice(("cakes", "shirts", "candles", "mugs", "bags", "posters", "toys", "chairs", "lamps"))
    n, cost, gain = rng.randint(2, 12) * rng.choice((1, 10)), rng.randint(2, 20), rng.randint(1, 9)
    price = cost + gain
    profit = n * gain
    who = rng.choice(("A shop", "A small firm", "A market stall", rng.choice(NAMES)))
    prompt = rng.choice(
        (
            f"{who} buys {item} for ${cost} each and sells them for ${price} each. What is the profit on {n} {item}?",
            f"{who} sells {n} {item} at ${price} each. Each one costs ${cost} to make. How much profit is that?",
            f"What profit does {who[0].lower() + who[1:] if who[:2] == 'A ' else who} make on {n} {item} "
            f"that cost ${cost} and sell for ${price} each?",
        )
    )
    answer = (
        f"Each sale brings a profit of ${price} - ${cost} = ${gain}. "
        f"On {n} {item} the profit is {n} * ${gain} = ${profit}."
    )
    return prompt, answer, profit, f"margin {n} {cost} {price} {item}"


def _breakeven(rng: random.Random) -> Draft:
    item = rng.choice(("cakes", "shirts", "candles", "mugs", "tickets", "posters", "lessons", "chairs", "apps"))
    units, cost, gain = rng.randint(2, 12) * 10, rng.randint(2, 20), rng.randint(2, 9)
    price, fixed = cost + gain, units * gain
    prompt = rng.choice(
        (
            f"A firm has fixed costs of ${fixed}. It sells {item} for ${price}, and each costs ${cost} to make. "
            f"How many must it sell to break even?",
            f"Fixed costs are ${fixed}, the variable cost is ${cost} and the price is ${price}. "
            f"How many {item} is the break-even point?",
            f"Selling {item} at ${price} each, with a cost of ${cost} each and ${fixed} of rent, "
            "when do I break even?",
        )
    )
    answer = (
        f"Every unit contributes ${price} - ${cost} = ${gain} toward the fixed costs. "
        f"Break-even is reached at ${fixed} / ${gain} = {units} {item}."
    )
    return prompt, answer, units, f"breakeven {fixed} {cost} {price} {item}"


def _budget(rng: random.Random) -> Draft:
    name = rng.choice(NAMES)
    parts = rng.sample(
        ("rent", "food", "transport", "insurance", "phone bills", "clothes", "heating", "school fees"), 2
    )
    a, b = rng.randint(5, 60) * 10, rng.randint(2, 40) * 10
    spent = a + b
    left = rng.randint(2, 60) * 10
    income = spent + left
    prompt = rng.choice(
        (
            f"{name} earns ${income} a month and pays ${a} for {parts[0]} and ${b} for {parts[1]}. How much is left?",
            f"Out of ${income} a month, ${a} goes to {parts[0]} and ${b} to {parts[1]}. What remains for {name}?",
            f"My income is ${income}. I spend ${a} on {parts[0]} and ${b} on {parts[1]}. How much can I save?",
        )
    )
    answer = (
        f"The costs for {parts[0]} and {parts[1]} come to ${a} + ${b} = ${spent}. "
        f"What is left is ${income} - ${spent} = ${left}."
    )
    return prompt, answer, left, f"budget {income} {a} {b}"


def _discount(rng: random.Random) -> Draft:
    item = rng.choice(("jacket", "lamp", "desk", "tent", "watch", "printer", "carpet", "phone", "bag"))
    hundreds = rng.randint(1, 12)
    price, percent = hundreds * 100, rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60))
    off = hundreds * percent
    up = rng.random() < 0.4
    if up:
        prompt = rng.choice(
            (
                f"A {item} costs ${price} before a sales tax of {percent}%. What is the price with tax?",
                f"Tax of {percent}% is added to the ${price} price of a {item}. What does the buyer pay?",
            )
        )
        answer = (
            f"The tax is {percent}% of ${price}, which is ${off}. "
            f"The buyer pays ${price} + ${off} = ${price + off} for the {item}."
        )
        return prompt, answer, price + off, f"tax {item} {price} {percent}"
    prompt = rng.choice(
        (
            f"A {item} that costs ${price} is on sale at {percent}% off. What is the sale price?",
            f"How much do I pay for a ${price} {item} with a discount of {percent}%?",
            f"The store takes {percent}% off a {item} priced at ${price}. What does it cost now?",
        )
    )
    answer = (
        f"The discount is {percent}% of ${price}, which is ${off}. "
        f"The {item} now costs ${price} - ${off} = ${price - off}."
    )
    return prompt, answer, price - off, f"discount {item} {price} {percent}"


def _loan(rng: random.Random) -> Draft:
    name = rng.choice(NAMES)
    payment, months = rng.randint(2, 30) * 10, rng.randint(3, 12)
    total = payment * months
    fee = rng.randint(1, 9) * 10
    amount = total - fee
    if amount <= 0:
        return _loan(rng)
    prompt = rng.choice(
        (
            f"{name} borrows ${amount} and repays ${payment} a month for {months} months. What does the loan cost?",
            f"A loan of ${amount} is repaid with {months} payments of ${payment}. How much is paid beyond the loan?",
        )
    )
    answer = (
        f"The {months} payments add up to {months} * ${payment} = ${total}. "
        f"That is ${total} - ${amount} = ${fee} more than was borrowed."
    )
    return prompt, answer, fee, f"loan {amount} {payment} {months}"


def _dividend(rng: random.Random) -> Draft:
    name = rng.choice(NAMES)
    shares, price, up = rng.randint(2, 9) * 10, rng.randint(5, 30), rng.randint(1, 9)
    new, gain = price + up, shares * up
    prompt = rng.choice(
        (
            f"{name} buys {shares} shares at ${price} and sells them at ${new}. What is the gain?",
            f"If {shares} shares bought at ${price} each are now worth ${new} each, what is the gain for {name}?",
            f"I own {shares} shares that went from ${price} to ${new} each. How much did I make?",
        )
    )
    answer = (
        f"Each share gained ${new} - ${price} = ${up}. For {shares} shares the gain is {shares} * ${up} = ${gain}."
    )
    return prompt, answer, gain, f"shares {shares} {price} {new}"


KINDS: tuple[Callable[[random.Random], Draft], ...] = (
    _interest,
    _change,
    _saving,
    _budget,
    _margin,
    _margin,
    _breakeven,
    _breakeven,
    _discount,
    _discount,
    _loan,
    _loan,
    _dividend,
    _dividend,
)


def make(rng: random.Random, wanted: Callable[[str], bool]) -> Example | None:
    """Draw one money question, or `None` if its content is not `wanted`."""
    prompt, answer, figure, content = rng.choice(KINDS)(rng)
    if not wanted(content):
        return None
    return Example("finance", prompt, answer, content, (str(figure),))


def check(example: Example, answer: str) -> bool:
    """Return whether the last figure is the result, all figures are known, and all equations hold."""
    figures = numbers_in(answer)
    if not figures or float(example.key[0]) not in numbers_in(answer.rstrip(".").rpartition(". ")[2]):
        return False
    known = set(numbers_in(example.prompt)) | set(numbers_in(example.answer))
    return figures[-1] == float(example.key[0]) and set(figures) <= known and equations_hold(answer)
