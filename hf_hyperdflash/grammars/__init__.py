"""Grammars: logits processors with a state that run on drafts, too, and the states of three libraries."""
