"""An OpenAI-compatible server that learns, and a proxy that learns for engines behind it (extra `serve`)."""
