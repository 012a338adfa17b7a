"""Requests for a small Python function with one or two examples, answered by the function."""

import ast
import builtins
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from bundled_prompts.example import Example


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


def _strings(rng: random.Random) -> Task:
    k = rng.randint(2, 6)
    a, b = rng.sample("aeiorstnlcdmp", 2)
    s = rng.choice(TEXT_NAMES)
    names, returns, body = rng.choice(
        (
            (
                (f"count_{a}", "letter_count", "occurrences"),
                f"how many times the letter '{a}' occurs in a string",
                [f'return {s}.count("{a}")'],
            ),
            (
                ("swap_letters", "replace_letter", f"{a}_to_{b}"),
                f"a string with every '{a}' replaced by '{b}'",
                [f'return {s}.replace("{a}", "{b}")'],
            ),
            (
                ("drop_letter", f"without_{a}", "remove_letter"),
                f"a string without the letter '{a}'",
                [f'return {s}.replace("{a}", "")'],
            ),
            (("prefix", "first_letters", "start_of"), f"the first {k} characters of a string", [f"return {s}[:{k}]"]),
            (("suffix", "last_letters", "end_of"), f"the last {k} characters of a string", [f"return {s}[-{k}:]"]),
            (("repeat", "echo", "repeat_text"), f"a string repeated {k} times", [f"return {s} * {k}"]),
            (("mirror", "reverse", "backwards"), "a string in reverse order", [f"return {s}[::-1]"]),
            (
                ("shout", "to_upper", "loud"),
                "a string in upper case with an exclamation mark",
                [f'return {s}.upper() + "!"'],
            ),
            (
                ("count_vowels", "vowels", "vowel_count"),
                "the number of vowels in a string",
                [f'return sum(1 for c in {s} if c in "aeiou")'],
            ),
            (
                ("only_vowels", "keep_vowels", "vowels_of"),
                "only the vowels of a string",
                [f'return "".join(c for c in {s} if c in "aeiou")'],
            ),
            (
                ("no_vowels", "strip_vowels", "consonants"),
                "a string without its vowels",
                [f'return "".join(c for c in {s} if c not in "aeiou")'],
            ),
            (
                ("starts_with", f"begins_{a}", "has_prefix"),
                f"whether a string starts with the letter '{a}'",
                [f'return {s}.startswith("{a}")'],
            ),
            (
                ("ends_with", f"ends_{a}", "has_suffix"),
                f"whether a string ends with the letter '{a}'",
                [f'return {s}.endswith("{a}")'],
            ),
            (
                ("contains", f"has_{a}", "includes"),
                f"whether a string contains the letter '{a}'",
                [f'return "{a}" in {s}'],
            ),
            (
                ("is_long", "long_enough", "too_long"),
                f"whether a string has more than {k} characters",
                [f"return len({s}) > {k}"],
            ),
            (
                ("is_palindrome", "same_backwards", "palindrome"),
                "whether a string reads the same backwards",
                [f"return {s} == {s}[::-1]"],
            ),
            (
                ("wrap", "surround", "decorate"),
                f"a string with '{a}' in front of it and '{b}' behind it",
                [f'return "{a}" + {s} + "{b}"'],
            ),
        )
    )
    return Task(names, (s,), returns, body, random_text)


def _sentences(rng: random.Random) -> Task:
    k = rng.randint(4, 7)
    a = rng.choice("aeiorstnlcdmp")
    s = rng.choice(SENTENCE_NAMES)
    mark, mark_name = rng.choice((("-", "hyphens"), ("_", "underscores"), (",", "commas"), ("/", "slashes")))
    names, returns, body = rng.choice(
        (
            (
                ("long_words", "select_words", "big_words"),
                f"the words of a sentence with more than {k} letters",
                [f"return [w for w in {s}.split() if len(w) > {k}]"],
            ),
            (
                ("short_words", "small_words", "brief_words"),
                f"the words of a sentence with less than {k} letters",
                [f"return [w for w in {s}.split() if len(w) < {k}]"],
            ),
            (
                ("words_starting", f"words_with_{a}", "pick_words"),
                f"the words of a sentence that start with '{a}'",
                [f'return [w for w in {s}.split() if w.startswith("{a}")]'],
            ),
            (
                ("words_containing", "matching_words", "find_words"),
                f"the words of a sentence that contain '{a}'",
                [f'return [w for w in {s}.split() if "{a}" in w]'],
            ),
            (
                ("word_count", "count_words", "how_many_words"),
                "the number of words in a sentence",
                [f"return len({s}.split())"],
            ),
            (
                ("count_long_words", "long_word_count", "number_of_long"),
                f"how many words of a sentence have more than {k} letters",
                [f"return sum(1 for w in {s}.split() if len(w) > {k})"],
            ),
            (
                ("longest_word", "longest", "biggest_word"),
                "the longest word of a sentence",
                [f"return max({s}.split(), key=len)"],
            ),
            (
                ("shortest_word", "shortest", "smallest_word"),
                "the shortest word of a sentence",
                [f"return min({s}.split(), key=len)"],
            ),
            (
                ("initials", "first_letters", "acronym"),
                "the first letters of the words of a sentence",
                [f'return "".join(w[0] for w in {s}.split())'],
            ),
            (
                ("word_lengths", "lengths", "letter_counts"),
                "the lengths of the words of a sentence",
                [f"return [len(w) for w in {s}.split()]"],
            ),
            (
                ("reverse_words", "flip_words", "words_backwards"),
                "the words of a sentence in reverse order",
                [f'return " ".join({s}.split()[::-1])'],
            ),
            (
                ("sorted_words", "sort_words", "alphabetical"),
                "the words of a sentence in alphabetical order",
                [f"return sorted({s}.split())"],
            ),
            (
                ("join_words", "slug", "connect"),
                f"the words of a sentence joined by {mark_name}",
                [f'return "{mark}".join({s}.split())'],
            ),
            (
                ("title_words", "capitalize_words", "title_case"),
                "a sentence with every word capitalized",
                [f'return " ".join(w.capitalize() for w in {s}.split())'],
            ),
        )
    )
    return Task(names, (s,), returns, body, random_sentence)


def _dicts(rng: random.Random) -> Task:
    k = rng.randint(3, 16)
    d, of = rng.choice(
        (("prices", "price"), ("stock", "count"), ("scores", "score"), ("ages", "age"), ("votes", "count"))
    )
    names, returns, body = rng.choice(
        (
            (
                ("keys_above", "expensive", "over_limit"),
                f"the keys of a dict whose {of} is greater than {k}",
                [f"return [key for key, value in {d}.items() if value > {k}]"],
            ),
            (
                ("keys_below", "cheap", "under_limit"),
                f"the keys of a dict whose {of} is less than {k}",
                [f"return [key for key, value in {d}.items() if value < {k}]"],
            ),
            (
                ("filter_dict", "keep_above", "only_large"),
                f"a dict with only the entries whose {of} is at least {k}",
                [f"return {{key: value for key, value in {d}.items() if value >= {k}}}"],
            ),
            (
                ("raise_all", "add_to_all", "increase"),
                f"a dict with {k} added to every {of}",
                [f"return {{key: value + {k} for key, value in {d}.items()}}"],
            ),
            (
                ("scale_all", "multiply_all", "scale"),
                f"a dict with every {of} multiplied by {k}",
                [f"return {{key: value * {k} for key, value in {d}.items()}}"],
            ),
            (("total", "sum_values", "overall"), f"the sum of every {of} in a dict", [f"return sum({d}.values())"]),
            (
                ("best_key", "top_key", "winner"),
                f"the key of a dict with the highest {of}",
                [f"return max({d}, key={d}.get)"],
            ),
            (
                ("worst_key", "lowest_key", "loser"),
                f"the key of a dict with the lowest {of}",
                [f"return min({d}, key={d}.get)"],
            ),
            (
                ("ranking", "sorted_keys", "order_keys"),
                f"the keys of a dict sorted by {of}",
                [f"return sorted({d}, key={d}.get)"],
            ),
            (
                ("swap", "invert", "flip_dict"),
                f"a dict that maps each {of} back to its key",
                [f"return {{value: key for key, value in {d}.items()}}"],
            ),
            (
                ("count_above", "how_many_above", "number_above"),
                f"how many keys of a dict have a {of} greater than {k}".replace("a age", "an age"),
                [f"return sum(1 for value in {d}.values() if value > {k})"],
            ),
        )
    )
    return Task(names, (d,), returns, body, random_table)


def _scalars(rng: random.Random) -> Task:
    k, m = rng.randint(2, 20), rng.randint(2, 12)
    n = rng.choice(("n", "x", "number", "value", "amount"))
    yes, no = rng.choice(
        (("pass", "fail"), ("high", "low"), ("yes", "no"), ("warm", "cold"), ("adult", "child"), ("big", "small"))
    )
    low, high = sorted((k, k + m))
    names, returns, body = rng.choice(
        (
            (
                ("grade", "label", "classify"),
                f"'{yes}' if a number is at least {k} and '{no}' otherwise",
                [f"if {n} >= {k}:", f'    return "{yes}"', f'return "{no}"'],
            ),
            (
                ("check", "judge", "describe"),
                f"'{yes}' if a number is greater than {k} and '{no}' otherwise",
                [f"if {n} > {k}:", f'    return "{yes}"', f'return "{no}"'],
            ),
            (
                ("is_multiple", "divides", "divisible"),
                f"whether a number is divisible by {m}",
                [f"return {n} % {m} == 0"],
            ),
            (("linear", "scale_and_shift", "line"), f"{m} times a number plus {k}", [f"return {m} * {n} + {k}"]),
            (("distance", "gap", "how_far"), f"the distance of a number from {k}", [f"return abs({n} - {k})"]),
            (
                ("clamp", "limit", "bound"),
                f"a number limited to the range from {low} to {high}",
                [f"return max({low}, min({n}, {high}))"],
            ),
            (
                ("in_range", "between", "inside"),
                f"whether a number lies between {low} and {high}",
                [f"return {low} <= {n} <= {high}"],
            ),
            (("cap", "at_most", "upper_limit"), f"a number, but never more than {k}", [f"return min({n}, {k})"]),
            (("floor_at", "at_least", "lower_limit"), f"a number, but never less than {k}", [f"return max({n}, {k})"]),
            (("remainder", "leftover", "rest"), f"the remainder of a number divided by {m}", [f"return {n} % {m}"]),
            (
                ("sign", "direction", "sign_of"),
                "1 for a positive number, -1 for a negative number and 0 for zero",
                [f"if {n} > 0:", "    return 1", f"if {n} < 0:", "    return -1", "return 0"],
            ),
            (
                ("multiples", "times_table", "products"),
                f"the first {k} multiples of a number",
                [f"return [{n} * i for i in range(1, {k} + 1)]"],
            ),
            (
                ("parity", "even_or_odd", "kind"),
                "'even' for an even number and 'odd' for an odd one",
                [f"if {n} % 2 == 0:", '    return "even"', 'return "odd"'],
            ),
        )
    )
    return Task(names, (n,), returns, body, random_integer)


KINDS = (filtered, filtered, filtered, plain_list, _strings, _sentences, _dicts, _scalars)

_BUILTINS = (
    "abs all any bool dict enumerate float int len list map max min range reversed round set sorted str sum tuple zip"
)
_ALLOWED = {name: getattr(builtins, name) for name in _BUILTINS.split()}


def _load(source: str) -> dict[str, Any]:
    """Run a module that may only define functions with the allowed builtins.

    Raises:
        ValueError: if it does more than that, or has a loop without a bound.
    """
    tree = ast.parse(source)
    if not tree.body or not all(isinstance(node, ast.FunctionDef) for node in tree.body):
        raise ValueError("expected nothing but function definitions")
    for node in ast.walk(tree):
        if isinstance(node, (ast.While, ast.Import, ast.ImportFrom, ast.Global, ast.Pow)):
            raise ValueError(f"{type(node).__name__} is not allowed")
        names = [getattr(node, field, "") for field in ("attr", "id")]
        if any(str(name).startswith("__") for name in names):
            raise ValueError("names with two underscores are not allowed")
    namespace: dict[str, Any] = {"__builtins__": _ALLOWED}
    exec(compile(tree, "<answer>", "exec"), namespace)
    return namespace


def _inputs(task: Task, rng: random.Random, n: int) -> list[tuple[Any, ...]]:
    """Return `n` argument tuples, the first two with different results if possible."""
    namespace = _load("\n".join([f"def f({', '.join(task.parameters)}):", *("    " + line for line in task.body)]))
    found = [task.inputs(rng)]
    for _ in range(8):
        other = task.inputs(rng)
        if namespace["f"](*other) != namespace["f"](*found[0]):
            found.append(other)
            break
    while len(found) < n:
        found.append(task.inputs(rng))
    return found


def make(rng: random.Random, wanted: Callable[[str], bool]) -> Example | None:
    """Draw one request, or `None` if its content is not `wanted`."""
    task = rng.choice(KINDS)(rng)
    name = rng.choice(task.names)
    if rng.random() < 0.1:
        name = rng.choice(("solve", "compute", "process", "helper", "func", "run"))
    signature = f"{name}({', '.join(task.parameters)})"
    content = f"{signature} {task.returns}"
    if not wanted(content):
        return None
    returns = task.returns.removesuffix(", using a loop")
    answer = "\n".join([f"def {signature}:", f'    """Return {returns}."""', *("    " + line for line in task.body)])
    function = _load(answer)[name]
    inputs = _inputs(task, rng, 6)
    shown = inputs[: rng.randint(1, 2)]
    examples = [f"{name}({', '.join(map(repr, arguments))}) -> {function(*arguments)!r}" for arguments in shown]
    request = rng.choice(
        (
            f"Write a Python function {signature} that returns {task.returns}.",
            f"Write {signature} in Python. It returns {task.returns}.",
            f"I need a function {signature} which gives back {task.returns}.",
            f"Please implement {signature}: it should return {task.returns}.",
            f"def {signature}: return {task.returns}.",
        )
    )
    prompt = request + "\n" + "\n".join(examples)
    tests = tuple(f"{arguments!r}" for arguments in inputs)
    return Example("python", prompt, answer, content, (name, *tests))


def check(example: Example, answer: str) -> bool:
    """Return whether the answer gives the correct results on the examples in the prompt and on hidden ones."""
    name, *tests = example.key
    reference = _load(example.answer)[name]
    try:
        function = _load(answer.strip())[name]
        for test in tests:
            expected, got = reference(*ast.literal_eval(test)), function(*ast.literal_eval(test))
            if type(got) is not type(expected) or got != expected:
                return False
    # Whatever a stranger's code raises, it is wrong.
    except Exception:  # noqa: BLE001
        return False
    return True
