"""Drafting without this package: the code that goes with a saved drafter, for people who read it before trusting it.

The parts that compute drafts (reducers, heads, layers) are the package's own files. What is written here a second
time, and shorter, is the loop, the target as it sees it, and the drafters' contexts: one text, a chain of drafts,
ordinary caches. [`~drafters.letter`] joins both into one file.
"""
