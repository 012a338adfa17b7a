"""Assisted decoding of a request: hook, checks, candidates, forwards, and what is recorded."""
