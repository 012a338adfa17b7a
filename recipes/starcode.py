"""
StarCode: source files to be continued from their first 200 tokens. For decoder-only pairs, as in the paper's
repository.

    python recipes/starcode.py                                       # the paper's models, online
    python recipes/starcode.py --target bigcode/starcoderbase --draft bigcode/starcoderbase-1b
    python recipes/starcode.py --mode offline
    python recipes/starcode.py --target DIR --draft DIR --data starcode.jsonl --requests 600

The data set is gated: accept its terms on the Hub and log in. Columns: `content`; `id`, `max_stars_repo_path`,
`max_stars_repo_name` and `max_stars_count` are not used.
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="starcode",
    hub="bigcode/starcoderdata",
    folder="rust",  # the paper's repository takes Rust; each language is a folder
    split="train",
    template="{content}",
    architectures=("causal",),
    max_text_tokens=200,
    is_chat=False,
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
