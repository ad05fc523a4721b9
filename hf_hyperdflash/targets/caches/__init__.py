"""Caches of targets from which the last tokens can be removed, for each kind of layer."""
