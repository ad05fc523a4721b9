"""Several sequences that share the forwards of their target."""
