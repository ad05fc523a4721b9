"""The prompt suites against a server."""
