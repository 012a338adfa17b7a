"""
CodeSearchNet, Python: functions by their documentation.

    python recipes/code_search_net_python.py                         # the paper's models, online
    python recipes/code_search_net_python.py --mode offline
    python recipes/code_search_net_python.py --arch t5
    python recipes/code_search_net_python.py --target DIR --draft DIR --data code_search_net_python.jsonl \\
        --template 'Write Python: {func_documentation_string:.300}'

Columns: `func_documentation_string`; `func_code_string` and the others are not used.
"""

from experiment import Experiment, main

EXPERIMENT = Experiment(
    name="code_search_net_python",
    hub="code-search-net/code_search_net",
    subset="python",
    split="train",
    template="Write a Python function with this documentation:\n{func_documentation_string}",
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__)
