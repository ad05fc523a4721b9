"""Drafters: what all of them are, and each kind."""
