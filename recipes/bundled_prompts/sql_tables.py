"""Tables of the SQL questions."""

from typing import NamedTuple


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
