"""Model cards, pushing, and others' checkpoint layouts."""
