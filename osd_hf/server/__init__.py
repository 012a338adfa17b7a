"""An OpenAI-compatible HTTP server for an `OnlineAssistant`."""
