"""What is kept of requests, in memory and on disk."""
