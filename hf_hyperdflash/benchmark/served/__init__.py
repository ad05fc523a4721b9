"""Measures a server with the prompt suites."""
