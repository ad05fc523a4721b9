"""Training a drafter: data, losses, trainer, script."""
