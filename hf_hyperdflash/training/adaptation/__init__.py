"""Learning while serving."""
