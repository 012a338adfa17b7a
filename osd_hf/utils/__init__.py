"""Files and locks that outlast crashes, masks of secrets, reports."""
