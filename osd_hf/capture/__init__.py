"""What is seen of a request: the hook, the checks before it, and the recording."""
