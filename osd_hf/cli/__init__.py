"""The commands, and the codes that they exit with where all went well but for something."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
