"""
Finance-Alpaca: questions about money.

    python recipes/finance_alpaca.py                                 # the paper's models, online
    python recipes/finance_alpaca.py --mode offline
    python recipes/finance_alpaca.py --arch t5
    python recipes/finance_alpaca.py --target DIR --draft DIR --data finance_alpaca.jsonl --requests 600

Columns: `instruction`; `input`, `output` and `text` are not used.
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="finance_alpaca",
    hub="gbharti/finance-alpaca",
    split="train",
    template="{instruction}",
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
