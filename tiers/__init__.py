"""Where experts live. Knows bytes, not mathematics."""
