"""Tasks of small Python functions on lists, strings, dicts, and numbers."""

import random

from bundled_prompts.python_lists import (
    SENTENCE_NAMES,
    TEXT_NAMES,
    Task,
    filtered,
    plain_list,
    random_integer,
    random_sentence,
    random_table,
    random_text,
)


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
