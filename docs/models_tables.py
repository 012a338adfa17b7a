"""Write the tables of models.md from the data that the code uses: `python docs/models_tables.py`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from osd_hf.decoding import checks
from osd_hf.decoding.exactness import CAUSES

PAGE = Path(__file__).parent / "models.md"
SURVEY = Path(__file__).parent.parent / "recipes" / "results" / "exactness_survey_models.json"
# What the outcomes of a family say, the first that fits.
ANSWERS: tuple[tuple[str, Callable[[set[str]], bool]], ...] = (
    ("**Other tokens than the target's, or an error**", lambda found: bool(found & {"DIFFERENT", "ERROR"})),
    ("**Exact, with speculation**", lambda found: "same" in found),
    ("**Exact, without speculation**", lambda found: "same, without speculation" in found),
    ("**Refused**", lambda found: "refused" in found),
    ("**Not examined**: the target alone fails in a tiny configuration, or it cannot be built", lambda found: True),
)
BEGIN, END = "<!-- tables: python docs/models_tables.py -->", "<!-- end of tables -->"


def table(*columns: str, rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def harmless(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{value}`" for value in dict.fromkeys(values) if value is not None) or "unset"


def tables() -> str:
    """Return the part of the page between the two marks."""
    causes = [(cause.name, cause.example, cause.answer) for cause in CAUSES]
    settings = [
        *((f"`{name}`", harmless(ok), "without speculation", why) for name, ok, why in checks.UNDRAFTED),
        *((f"`{name}`", "unset", "without speculation", why) for name, why in checks.ALONE_ARGUMENTS),
        *((f"`{name}`", harmless(ok), "refused", why) for name, ok, why in checks.REFUSED),
        *((f"`{name}`", "unset", "refused", why) for name, why in checks.REFUSED_ARGUMENTS),
    ]
    lines = [
        "### Known causes",
        "",
        *table("why several tokens at a time differ from single ones", "for example", "answered", rows=causes),
        "",
        "### Settings and arguments",
        "",
        *table("setting", "does nothing if", "otherwise", "reason", rows=settings),
        "",
        "### Model families",
        "",
        *families(),
    ]
    return "\n".join(lines)


def families() -> list[str]:
    """Return the outcomes of the survey's model families, by the kind of outcome."""
    outcomes: dict[str, set[str]] = defaultdict(set)
    for row in json.loads(SURVEY.read_text(encoding="utf-8"))["rows"]["models"]:
        outcomes[re.sub(r".*\((.*?)\)", r"\1", row["target"])].add(row["outcome"].partition(":")[0])
    groups: dict[str, list[str]] = {answer: [] for answer, _ in ANSWERS}
    for family, found in sorted(outcomes.items()):
        groups[next(answer for answer, is_it in ANSWERS if is_it(found))].append(f"`{family}`")
    return [f"- {answer} ({len(names)}): {', '.join(names)}." for answer, names in groups.items() if names]


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
