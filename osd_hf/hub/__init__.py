"""What goes to the Hub, and what its cards say."""
