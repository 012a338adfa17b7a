"""What is published: cards, drafts and stores on the Hub, drafts for serving engines."""
