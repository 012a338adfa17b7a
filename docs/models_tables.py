"""Write the tables of settings and model families in models.md: `python docs/models_tables.py`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

from osd_hf.decoding import checks

PAGE = Path(__file__).parent / "models.md"
SURVEY = Path(__file__).parent.parent / "recipes" / "results" / "exactness_survey_models.json"
BEGIN, END = "<!-- tables: python docs/models_tables.py -->", "<!-- end of tables -->"
# Groups of families, and the outcomes that place a family there; the first match counts.
GROUPS = (
    ("**Different tokens, or an error**", {"DIFFERENT", "ERROR"}),
    ("**Exact, with speculation**", {"same"}),
    ("**Exact, without speculation**", {"same, without speculation"}),
    ("**Refused**", {"refused"}),
    ("**Not examined**: the target itself fails in a tiny configuration, or it cannot be built", None),
)


def tables() -> str:
    """Return the part of the page between the two marks."""
    rows = [
        *((name, neutral, "without speculation", reason) for name, neutral, reason in checks.UNDRAFTED),
        *((name, (), "without speculation", reason) for name, reason in checks.ALONE_ARGUMENTS),
        *((name, neutral, "refused", reason) for name, neutral, reason in checks.REFUSED),
        *((name, (), "refused", reason) for name, reason in checks.REFUSED_ARGUMENTS),
    ]
    lines = [
        "### Settings and arguments",
        "",
        "| setting | neutral values | otherwise | reason |",
        "|---|---|---|---|",
    ]
    for name, neutral, answer, reason in rows:
        values = ", ".join(f"`{value}`" for value in dict.fromkeys(neutral) if value is not None)
        lines.append(f"| `{name}` | {values or 'unset'} | {answer} | {reason} |")
    return "\n".join([*lines, "", "### Model families", "", *families()])


def families() -> list[str]:
    """Return the model families of the survey, by outcome."""
    outcomes: dict[str, set[str]] = defaultdict(set)
    for row in json.loads(SURVEY.read_text(encoding="utf-8"))["rows"]["models"]:
        outcomes[re.sub(r".*\((.*?)\)", r"\1", row["target"])].add(row["outcome"].partition(":")[0])
    groups: dict[str, list[str]] = {name: [] for name, _ in GROUPS}
    for family, found in sorted(outcomes.items()):
        groups[next(name for name, wanted in GROUPS if wanted is None or found & wanted)].append(f"`{family}`")
    return [f"- {name} ({len(members)}): {', '.join(members)}." for name, members in groups.items() if members]


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
