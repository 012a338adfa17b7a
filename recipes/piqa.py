"""
PIQA: how things are done in the physical world. For decoder-only pairs, as in the paper's repository.

    python recipes/piqa.py                                           # the paper's models, online
    python recipes/piqa.py --mode offline
    python recipes/piqa.py --target DIR --draft DIR --data piqa.jsonl --requests 600

Columns: `goal`; `sol1`, `sol2` and `label` are not used.
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="piqa",
    hub="ybisk/piqa",
    revision="refs/convert/parquet",  # its main branch holds a loading script, which `datasets` no longer runs
    split="train",
    template="{goal}",
    architectures=("causal",),
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
