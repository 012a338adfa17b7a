"""Publish drafts and stores on the Hub, and export drafts for serving engines."""
