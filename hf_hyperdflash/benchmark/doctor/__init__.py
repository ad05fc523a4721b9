"""Examines a target and its drafter."""
