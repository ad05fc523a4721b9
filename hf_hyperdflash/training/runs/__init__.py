"""What a run leaves and how it goes on: checkpoints, identity, record, progress."""
