"""Commands and their exit codes."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
