"""Targets: a model as drafters and the loop see it, one file per family or kin of families."""
