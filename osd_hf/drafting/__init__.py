"""How the draft guesses: candidates, forwards, and how many."""
