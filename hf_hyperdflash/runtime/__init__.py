"""What drafting needs, and nothing else: exactly the files that a pushed drafter carries, so flat."""
