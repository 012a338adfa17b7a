"""
Chatbot Arena conversations, by language or by topic: a fresh draft learns the first turns of each. For decoder-only
pairs, as in the paper.

    python recipes/arena.py                                          # the paper's models and languages, online
    python recipes/arena.py --by topic
    python recipes/arena.py --labels Japanese Russian --requests 500 --mode offline
    python recipes/arena.py --target DIR --draft DIR --data arena.jsonl --labels German --requests 100

The data set is gated: accept its terms on the Hub and log in. Columns: `conversation_a` (messages with `role` and
`content`) and `language`; the others are not used. Topics are those of English turns, given by a text classifier, as
in the paper's repository.
"""

from collections.abc import Iterator
from typing import Any

from experiment import Experiment, load_pair, make_parser, read_rows, run, write
from transformers import pipeline

EXPERIMENT = Experiment(
    name="arena",
    hub="lmsys/chatbot_arena_conversations",
    split="train",
    template="{conversation_a[0][content]}",
    architectures=("causal",),
)
LABELS = {
    "language": ["Chinese", "Japanese", "Spanish", "Portuguese", "Russian"],
    "topic": ["E-Commerce", "Food", "Photography", "Sports", "Travel"],
}


def labeled(args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with their language or topic."""
    if args.by == "topic":
        topic_of = pipeline("text-classification", model=args.classifier)
    for row in read_rows(EXPERIMENT, args):
        if args.by == "language":
            yield row["language"], row
        elif row["language"] == "English":
            yield topic_of(args.template.format(**row), truncation=True)[0]["label"], row


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(EXPERIMENT, __doc__)
    parser.add_argument("--by", choices=tuple(LABELS), default="language")
    parser.add_argument("--labels", nargs="+", help="languages or topics; the paper's by default")
    parser.add_argument("--classifier", default="alimazhar-110/website_classification", help="of the topics")
    args = parser.parse_args(argv)
    labels = args.labels or LABELS[args.by]
    pair = load_pair(args)
    wanted: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    for label, row in labeled(args):
        if len(wanted.get(label, ())) < args.requests and label in wanted:
            wanted[label].append(row)
        if all(len(rows) == args.requests for rows in wanted.values()):
            break
    write(EXPERIMENT, args, [run(EXPERIMENT, args, pair, rows, label) for label, rows in wanted.items() if rows])


if __name__ == "__main__":
    main()
