"""
CNN/DailyMail: news articles, summarized. The paper has it for encoder-decoder pairs; decoder-only ones run as well.

    python recipes/cnn_dailymail.py                                  # the paper's models, online
    python recipes/cnn_dailymail.py --mode offline --epochs 3
    python recipes/cnn_dailymail.py --arch causal
    python recipes/cnn_dailymail.py --target DIR --draft DIR --data cnn_dailymail.jsonl --requests 600

Columns: `article`; `highlights` and `id` are not used.
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="cnn_dailymail",
    hub="abisee/cnn_dailymail",
    subset="3.0.0",
    split="train",
    template="summarize: {article}",
    architectures=("t5", "causal"),
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
