"""The target's residual streams of a data set, computed once."""
