"""Drafters without weights, one file each."""
