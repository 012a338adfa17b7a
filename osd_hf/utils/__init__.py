"""Files, masks of secrets, reports, pictures."""
