"""Who learns, when, and which weights serve."""
