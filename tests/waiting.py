"""How long a test waits for what should come: until it comes."""

from __future__ import annotations

LONG = 600  # seconds. Decides nothing: it only ends a test that would hang, on the slowest machine that we think of.
