"""A training run: its checkpoints, its identity, its record, its progress."""
