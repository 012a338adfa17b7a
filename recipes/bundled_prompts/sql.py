"""Questions about one or two SQL tables, answered by a query that sqlite3 runs on the schema shown."""

import random
import re
import sqlite3
import zlib
from collections.abc import Callable
from typing import NamedTuple

from bundled_prompts.example import Example


class Table(NamedTuple):
    """A table: name, row, text columns with values, and number columns with wording and range."""

    name: str
    row: str
    texts: dict[str, tuple[str, ...]]
    numbers: dict[str, tuple[str, int, int]]


_CITIES = ("Paris", "Oslo", "Lima", "Cairo", "Tokyo", "Rome", "Boston", "Delhi")
_COLORS = ("red", "blue", "green", "black", "white")
TABLES = (
    Table(
        "players",
        "player",
        {"team": ("Lions", "Hawks", "Bears", "Sharks"), "position": ("guard", "center", "wing")},
        {
            "goals": ("goal count", 0, 40),
            "age": ("age", 17, 39),
            "salary": ("salary", 20, 99),
            "height": ("height", 160, 210),
        },
    ),
    Table(
        "books",
        "book",
        {"genre": ("poetry", "crime", "history", "travel"), "author": ("Silva", "Ito", "Moreau", "Khan")},
        {
            "price": ("price", 5, 60),
            "pages": ("page count", 90, 900),
            "year": ("year", 1950, 2024),
            "stock": ("stock", 1, 80),
        },
    ),
    Table(
        "employees",
        "employee",
        {"department": ("Sales", "Legal", "Support", "Research"), "city": _CITIES},
        {"salary": ("salary", 30, 99), "age": ("age", 20, 65), "bonus": ("bonus", 1, 20)},
    ),
    Table(
        "movies",
        "movie",
        {"genre": ("drama", "comedy", "horror", "western"), "director": ("Novak", "Sato", "Reyes", "Lind")},
        {
            "year": ("year", 1960, 2024),
            "rating": ("rating", 1, 10),
            "length": ("length", 70, 200),
            "budget": ("budget", 1, 99),
        },
    ),
    Table(
        "products",
        "product",
        {"category": ("toys", "garden", "kitchen", "sports"), "color": _COLORS},
        {
            "price": ("price", 2, 90),
            "stock": ("stock", 1, 80),
            "weight": ("weight", 1, 50),
            "rating": ("rating", 1, 10),
        },
    ),
    Table(
        "students",
        "student",
        {"major": ("Physics", "Biology", "Law", "Music"), "city": _CITIES},
        {"age": ("age", 17, 35), "credits": ("credit count", 5, 90), "score": ("score", 20, 99)},
    ),
    Table(
        "cars",
        "car",
        {"maker": ("Fiat", "Volvo", "Honda", "Tesla"), "color": _COLORS},
        {
            "price": ("price", 5, 90),
            "year": ("year", 1990, 2024),
            "seats": ("seat count", 2, 9),
            "mileage": ("mileage", 1, 200),
        },
    ),
    Table(
        "songs",
        "song",
        {"artist": ("Nova", "Echo", "Willow", "Drift"), "genre": ("jazz", "rock", "folk", "soul")},
        {"plays": ("play count", 1, 900), "length": ("length", 90, 400), "year": ("year", 1970, 2024)},
    ),
    Table(
        "hotels",
        "hotel",
        {"city": _CITIES, "owner": ("Costa", "Weber", "Tanaka", "Dupont")},
        {"stars": ("star count", 1, 5), "rooms": ("room count", 10, 400), "price": ("price", 30, 400)},
    ),
    Table(
        "flights",
        "flight",
        {"origin": _CITIES, "airline": ("SkyJet", "Aero", "Polar", "Condor")},
        {"price": ("price", 40, 900), "duration": ("duration", 1, 15), "seats": ("seat count", 50, 400)},
    ),
    Table(
        "animals",
        "animal",
        {"species": ("tiger", "zebra", "otter", "eagle"), "habitat": ("forest", "river", "desert", "coast")},
        {"age": ("age", 1, 30), "weight": ("weight", 1, 400)},
    ),
    Table(
        "patients",
        "patient",
        {"ward": ("North", "South", "East", "West"), "doctor": ("Adams", "Patel", "Kowalski", "Lopez")},
        {"age": ("age", 1, 95), "visits": ("visit count", 1, 20), "weight": ("weight", 20, 120)},
    ),
    Table(
        "recipes",
        "recipe",
        {"cuisine": ("Thai", "Greek", "Mexican", "Indian"), "course": ("soup", "salad", "dessert", "main")},
        {
            "minutes": ("cooking time", 5, 120),
            "calories": ("calorie count", 90, 900),
            "servings": ("serving count", 1, 12),
        },
    ),
    Table(
        "houses",
        "house",
        {"city": _CITIES, "style": ("modern", "cottage", "villa", "loft")},
        {
            "price": ("price", 90, 900),
            "rooms": ("room count", 1, 12),
            "area": ("area", 40, 400),
            "year": ("year", 1900, 2024),
        },
    ),
    Table(
        "games",
        "game",
        {"studio": ("Pixel", "Orbit", "Falcon", "Maple"), "platform": ("PC", "console", "mobile")},
        {"price": ("price", 5, 80), "score": ("score", 10, 99), "year": ("year", 1990, 2024)},
    ),
    Table(
        "concerts",
        "concert",
        {"city": _CITIES, "band": ("Comets", "Foxes", "Tides", "Owls")},
        {"tickets": ("ticket count", 50, 900), "price": ("price", 10, 200), "year": ("year", 2000, 2024)},
    ),
)

# Parent table (with its own text and number), child table, foreign key.
JOINS = (
    (
        "authors",
        "author",
        "country",
        ("Spain", "Japan", "Brazil", "Kenya"),
        "books",
        "book",
        "author_id",
        {"price": ("price", 5, 60), "pages": ("page count", 90, 900)},
    ),
    (
        "teams",
        "team",
        "city",
        _CITIES,
        "players",
        "player",
        "team_id",
        {"goals": ("goal count", 0, 40), "age": ("age", 17, 39)},
    ),
    (
        "customers",
        "customer",
        "city",
        _CITIES,
        "orders",
        "order",
        "customer_id",
        {"amount": ("amount", 5, 400), "items": ("item count", 1, 30)},
    ),
    (
        "departments",
        "department",
        "building",
        ("Main", "Annex", "Tower", "Lab"),
        "employees",
        "employee",
        "department_id",
        {"salary": ("salary", 30, 99), "age": ("age", 20, 65)},
    ),
    (
        "artists",
        "artist",
        "country",
        ("Spain", "Japan", "Brazil", "Kenya"),
        "albums",
        "album",
        "artist_id",
        {"year": ("year", 1970, 2024), "sales": ("sales", 1, 400)},
    ),
    (
        "schools",
        "school",
        "city",
        _CITIES,
        "students",
        "student",
        "school_id",
        {"age": ("age", 6, 19), "score": ("score", 20, 99)},
    ),
    (
        "owners",
        "owner",
        "city",
        _CITIES,
        "pets",
        "pet",
        "owner_id",
        {"age": ("age", 1, 20), "weight": ("weight", 1, 60)},
    ),
    (
        "stores",
        "store",
        "region",
        ("North", "South", "East", "West"),
        "sales",
        "sale",
        "store_id",
        {"amount": ("amount", 5, 400), "units": ("unit count", 1, 50)},
    ),
)

_COMPARISONS = {
    ">": ("above", "greater than", "of more than"),
    "<": ("below", "less than", "under"),
    ">=": ("of at least", "of no less than"),
    "<=": ("of at most", "of no more than"),
}
_AGGREGATES = {
    "AVG": ("average", "mean"),
    "MAX": ("highest", "maximum"),
    "MIN": ("lowest", "minimum"),
    "SUM": ("total",),
}
_CREATE = re.compile(r"CREATE TABLE \w+ \([^)]*\);")
_COLUMN = re.compile(r"(\w+) (INTEGER|TEXT)")


def _a(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _plural(row: str) -> str:
    return row + "s"


def _value(rng: random.Random, low: int, high: int) -> int:
    value = rng.randint(low, high)
    return value if value < 100 or low > 1000 else round(value, -1)


def _condition(rng: random.Random, table: Table, column: str) -> tuple[str, str]:
    """Return a condition on one column: SQL, and words that follow the plural of the row."""
    if column in table.texts:
        word = rng.choice(table.texts[column])
        words = rng.choice((f"whose {column} is {word}", f"with {column} {word}", f"where the {column} is {word}"))
        return f"{column} = '{word}'", words
    phrase, low, high = table.numbers[column]
    operator = rng.choice(tuple(_COMPARISONS))
    value = _value(rng, low + 1, high - 1)
    return f"{column} {operator} {value}", f"with {_a(phrase)} {rng.choice(_COMPARISONS[operator])} {value}"


def _one_table(rng: random.Random) -> tuple[str, str, str, list[str]]:
    """Return (schema, question, comment, lines of the query) for one table."""
    table = rng.choice(TABLES)
    texts = rng.sample(tuple(table.texts), rng.randint(1, len(table.texts)))
    numbers = rng.sample(tuple(table.numbers), rng.randint(1, min(3, len(table.numbers))))
    columns = [f"{column} TEXT" for column in texts] + [f"{column} INTEGER" for column in numbers]
    rng.shuffle(columns)
    label = "title" if table.name in ("books", "movies", "songs", "games") else "name"
    schema = f"CREATE TABLE {table.name} (id INTEGER, {label} TEXT, {', '.join(columns)});"
    rows, source = _plural(table.row), f"FROM {table.name}"
    text, number = rng.choice(texts), rng.choice(numbers)
    phrase = table.numbers[number][0]
    condition, words = _condition(rng, table, rng.choice((*texts, *numbers)))
    kind = rng.choice(("count", "list", "list", "aggregate", "aggregate", "top", "group", "both", "having", "between"))
    if kind == "count":
        question = rng.choice(
            (
                f"How many {rows} are there {words}?",
                f"Count the {rows} {words}.",
                f"What is the number of {rows} {words}?",
            )
        )
        return schema, question, f"number of {rows} {words}", ["SELECT COUNT(*)", source, f"WHERE {condition}"]
    if kind == "list":
        question = rng.choice(
            (
                f"List the {label}s of the {rows} {words}.",
                f"Which {rows} are there {words}? Give the {label}s.",
                f"Show the {label} of all {rows} {words}.",
            )
        )
        return schema, question, f"{label}s of {rows} {words}", [f"SELECT {label}", source, f"WHERE {condition}"]
    if kind == "aggregate":
        function = rng.choice(tuple(_AGGREGATES))
        adjective = rng.choice(_AGGREGATES[function])
        lines = [f"SELECT {function}({number})", source]
        comment = f"{adjective} {phrase} of the {rows}"
        if rng.random() < 0.7:
            condition, words = _condition(rng, table, text)
            lines.append(f"WHERE {condition}")
            comment += f" {words}"
        question = rng.choice((f"What is the {comment}?", f"Find the {comment}.", f"Give me the {comment}."))
        return schema, question, comment, lines
    if kind == "top":
        limit = rng.randint(1, 5)
        down = rng.random() < 0.6
        adjective = "highest" if down else "lowest"
        some = f"{limit} {rows}" if limit > 1 else table.row
        comment = f"{some} with the {adjective} {phrase}"
        question = rng.choice(
            (f"Which {comment}? Give the {label}.", f"Show the {label} of the {comment}.", f"Find the {comment}.")
        )
        lines = [f"SELECT {label}", source, f"ORDER BY {number} {'DESC' if down else 'ASC'}", f"LIMIT {limit}"]
        return (
            schema,
            question.replace(f"Which {some} with", f"Which {some} {'have' if limit > 1 else 'has'}"),
            comment,
            lines,
        )
    if kind == "group":
        if rng.random() < 0.4:
            comment = f"number of {rows} per {text}"
            question = rng.choice(
                (
                    f"How many {rows} are there for each {text}?",
                    f"Count the {rows} per {text}.",
                    f"For every {text}, give the number of {rows}.",
                )
            )
            return schema, question, comment, [f"SELECT {text}, COUNT(*)", source, f"GROUP BY {text}"]
        function = rng.choice(tuple(_AGGREGATES))
        adjective = rng.choice(_AGGREGATES[function])
        comment = f"{adjective} {phrase} per {text}"
        question = rng.choice(
            (
                f"What is the {adjective} {phrase} for each {text}?",
                f"Show the {comment} of {rows}.",
                f"For every {text}, give the {adjective} {phrase}.",
            )
        )
        return schema, question, comment, [f"SELECT {text}, {function}({number})", source, f"GROUP BY {text}"]
    if kind == "both":
        first, first_words = _condition(rng, table, text)
        second, second_words = _condition(rng, table, number)
        words = (
            f"{first_words} and {second_words.removeprefix('with ')}"
            if first_words.startswith("with")
            else f"{first_words} and {second_words}"
        )
        counted = rng.random() < 0.5
        question = f"How many {rows} are there {words}?" if counted else f"List the {label}s of the {rows} {words}."
        comment = f"{'number' if counted else label + 's'} of {rows} {words}"
        return (
            schema,
            question,
            comment,
            [f"SELECT {'COUNT(*)' if counted else label}", source, f"WHERE {first} AND {second}"],
        )
    if kind == "having":
        n = rng.randint(2, 6)
        comment = f"each {text} with more than {n} {rows}"
        question = rng.choice((f"Which {text} has more than {n} {rows}?", f"Find {comment}.", f"Show {comment}."))
        return schema, question, comment, [f"SELECT {text}", source, f"GROUP BY {text}", f"HAVING COUNT(*) > {n}"]
    _, low, high = table.numbers[number]
    first_value, second_value = sorted((_value(rng, low, high), _value(rng, low, high)))
    words = f"with {_a(phrase)} between {first_value} and {second_value}"
    question = rng.choice(
        (f"List the {label}s of the {rows} {words}.", f"Which {rows} are there {words}? Give the {label}s.")
    )
    lines = [f"SELECT {label}", source, f"WHERE {number} BETWEEN {first_value} AND {second_value}"]
    return schema, question, f"{label}s of {rows} {words}", lines


def _two_tables(rng: random.Random) -> tuple[str, str, str, list[str]]:
    """Return (schema, question, comment, lines of the query) for a parent and a child table."""
    parent, one, place, places, child, row, key, measures = rng.choice(JOINS)
    number = rng.choice(tuple(measures))
    phrase, low, high = measures[number]
    label = "title" if child in ("books", "albums") else "code" if child in ("orders", "sales") else "name"
    schema = (
        f"CREATE TABLE {parent} (id INTEGER, name TEXT, {place} TEXT);\n"
        f"CREATE TABLE {child} (id INTEGER, {label} TEXT, {key} INTEGER, {number} INTEGER);"
    )
    join = [f"FROM {parent} JOIN {child}", f"ON {child}.{key} = {parent}.id"]
    rows = _plural(row)
    where = rng.choice(places)
    kind = rng.choice(("list", "count", "aggregate", "per", "owner"))
    if kind == "list":
        words = f"of {_plural(one)} whose {place} is {where}"
        question = rng.choice((f"List the {label}s of {rows} {words}.", f"Show the {label} of all {rows} {words}."))
        return (
            schema,
            question,
            f"{label}s of {rows} {words}",
            [f"SELECT {child}.{label}", *join, f"WHERE {parent}.{place} = '{where}'"],
        )
    if kind == "count":
        words = f"of {_plural(one)} whose {place} is {where}"
        question = rng.choice((f"How many {rows} belong to {words[3:]}?", f"Count the {rows} {words}."))
        return (
            schema,
            question,
            f"number of {rows} {words}",
            ["SELECT COUNT(*)", *join, f"WHERE {parent}.{place} = '{where}'"],
        )
    if kind == "aggregate":
        function = rng.choice(tuple(_AGGREGATES))
        adjective = rng.choice(_AGGREGATES[function])
        comment = f"{adjective} {phrase} of {rows} per {one}"
        question = rng.choice(
            (
                f"For each {one}, show the name and the {adjective} {phrase} of the {rows}.",
                f"What is the {adjective} {phrase} of {rows} per {one} name?",
            )
        )
        return (
            schema,
            question,
            comment,
            [f"SELECT {parent}.name, {function}({child}.{number})", *join, f"GROUP BY {parent}.name"],
        )
    if kind == "per":
        comment = f"number of {rows} per {one}"
        question = rng.choice(
            (
                f"How many {rows} does each {one} have? Give the names.",
                f"Show every {one} name with the number of {rows}.",
            )
        )
        return schema, question, comment, [f"SELECT {parent}.name, COUNT(*)", *join, f"GROUP BY {parent}.name"]
    operator = rng.choice(tuple(_COMPARISONS))
    value = _value(rng, low + 1, high - 1)
    words = f"with {_a(phrase)} {rng.choice(_COMPARISONS[operator])} {value}"
    question = rng.choice(
        (
            f"Show the {label} and the {one} name of {rows} {words}.",
            f"For {rows} {words}, list the {label} and the name of the {one}.",
        )
    )
    comment = f"{label} and {one} of {rows} {words}"
    return (
        schema,
        question,
        comment,
        [f"SELECT {child}.{label}, {parent}.name", *join, f"WHERE {child}.{number} {operator} {value}"],
    )


def make(rng: random.Random, wanted: Callable[[str], bool]) -> Example | None:
    """Draw one question about a schema, or `None` if its content is not `wanted`."""
    schema, question, comment, lines = (_two_tables if rng.random() < 0.3 else _one_table)(rng)
    query = "\n".join(lines) + ";"
    content = f"{schema} {query}"
    if not wanted(content):
        return None
    prompt = rng.choice(
        (
            f"{schema}\n{question}",
            f"{question}\n{schema}",
            f"Write SQL. {question}\n{schema}",
            f"Schema:\n{schema}\nQuestion: {question}",
        )
    )
    return Example("sql", prompt, f"-- {comment}\n{query}", content, (query,))


def _fill(database: sqlite3.Connection, schema: list[str], query: str, seed: int) -> None:
    """Fill the tables with rows on both sides of every literal of the query."""
    rng = random.Random(seed)
    numbers = [
        int(number) for number in re.findall(r"(?<![\w'])\d+", re.sub(r"LIMIT \d+|COUNT\(\*\) > \d+", "", query))
    ]
    strings = re.findall(r"'([^']*)'", query)
    for statement in schema:
        database.execute(statement)
        table = statement.split()[2]
        columns = _COLUMN.findall(statement)
        size = 24
        values: list[list[object]] = []
        for column, kind in columns:
            if column == "id":
                values.append([*range(1, size + 1)])
            elif column.endswith("_id"):
                values.append([rng.randint(1, 5) for _ in range(size)])
            elif kind == "INTEGER":
                # Distinct values (no ties to order), the literals and their neighbors among them.
                near = {number + step for number in numbers for step in (-1, 0, 1)}
                spread = [value for number in numbers or [50] for value in range(max(0, number - 30), number + 31)]
                pool = [*near, *rng.sample(sorted(set(spread) - near), size)][:size]
                rng.shuffle(pool)
                values.append([*pool])
            elif column in ("name", "title", "code"):
                values.append([f"{column}{rng.randint(0, 10**9)}" for _ in range(size)])
            else:
                words = [*strings, f"{column} a", f"{column} b", f"{column} c", f"{column} d"]
                values.append([words[min(int(rng.expovariate(0.5)), len(words) - 1)] for _ in range(size)])
        marks = ", ".join("?" * len(columns))
        database.executemany(f"INSERT INTO {table} VALUES ({marks})", zip(*values, strict=True))


def _run(schema: list[str], reference: str, query: str, seed: int) -> list[tuple[object, ...]]:
    database = sqlite3.connect(":memory:")
    try:
        _fill(database, schema, reference, seed)
        database.execute("PRAGMA query_only = ON")
        steps = 0

        def stop() -> int:
            nonlocal steps
            steps += 1
            return steps > 1000

        database.set_progress_handler(stop, 1000)
        rows = database.execute(query).fetchall()
    finally:
        database.close()
    return rows if "ORDER BY" in reference else sorted(rows, key=repr)


def check(example: Example, answer: str) -> bool:
    """Return whether the answer gives the rows of the reference query in sqlite3 on the schema of the prompt.

    Three databases are filled with rows around the literals of the reference, so that another column, comparison, or
    value gives another result.
    """
    schema = _CREATE.findall(example.prompt)
    reference = example.key[0]
    for trial in range(3):
        seed = zlib.crc32(f"{trial} {example.prompt}".encode())
        try:
            if _run(schema, reference, answer, seed) != _run(schema, reference, reference, seed):
                return False
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return False
    return True
