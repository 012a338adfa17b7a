"""Files and locks that outlast crashes, reports."""
