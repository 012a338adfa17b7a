"""
Spider: questions about databases, answered in SQL.

    python recipes/spider.py                                         # the paper's models, online
    python recipes/spider.py --mode offline
    python recipes/spider.py --arch t5
    python recipes/spider.py --target DIR --draft DIR --data spider.jsonl --template 'db: {db_id}\\n{question}'

Columns: `db_id`, `question`, `query` (not used: the target answers).
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="spider",
    hub="xlangai/spider",
    split="train",
    template="Translate this question to the database {db_id} into SQL. Answer with the SQL alone.\n{question}",
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
