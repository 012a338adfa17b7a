"""Write the prompts that the package ships: `python recipes/bundled_prompts/write.py`."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bundled_prompts import DOMAINS, first_examples

PROMPTS_PER_DOMAIN = 1000
FILE = Path(__file__).parents[2] / "osd_hf" / "bundled" / "prompts.jsonl"


def lines() -> list[str]:
    """Return one JSON object per prompt. `problem` numbers the problems of a domain, whatever their wording."""
    found = []
    for domain in DOMAINS:
        problems: dict[str, int] = {}
        for example in first_examples(domain, PROMPTS_PER_DOMAIN):
            number = problems.setdefault(example.content, len(problems))
            row = {"domain": domain, "problem": number, "prompt": example.prompt, "answer": example.answer}
            found.append(json.dumps(row))
    return found


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
