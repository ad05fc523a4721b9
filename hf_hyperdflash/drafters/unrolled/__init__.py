"""Drafters that go on from states of their own: EAGLE-3, SpecBlock."""
