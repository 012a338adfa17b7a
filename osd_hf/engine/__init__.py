"""Learning for an inference engine: from its requests to versions that it loads."""
