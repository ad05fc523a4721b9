"""Decoding with a drafter: what `generate` is asked for, the loop, its rounds, what comes out."""
