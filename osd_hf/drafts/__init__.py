"""The kinds of drafts that are more than a language model."""
