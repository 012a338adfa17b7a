"""
GSM8K: grade-school mathematics, answered in steps.

    python recipes/gsm8k.py                                          # the paper's models, online
    python recipes/gsm8k.py --mode offline --sample-source student --divergence reverse_kl
    python recipes/gsm8k.py --arch t5
    python recipes/gsm8k.py --target DIR --draft DIR --data gsm8k.jsonl --requests 600       # what is here

Columns: `question`, `answer` (not used: the target answers).
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="gsm8k",
    hub="openai/gsm8k",
    subset="main",
    split="train",
    template="{question}",
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
