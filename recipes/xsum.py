"""
XSum: news articles, summarized in one sentence. The paper has it for encoder-decoder pairs; decoder-only ones run as
well.

    python recipes/xsum.py                                           # the paper's models, online
    python recipes/xsum.py --mode offline --epochs 3
    python recipes/xsum.py --arch causal
    python recipes/xsum.py --target DIR --draft DIR --data xsum.jsonl --requests 600

Columns: `document`; `summary` and `id` are not used.
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="xsum",
    hub="EdinburghNLP/xsum",
    split="train",
    template="summarize: {document}",
    architectures=("t5", "causal"),
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
