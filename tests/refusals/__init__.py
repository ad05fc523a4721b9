"""What a user gets wrong, a table a room: value, expectation, one line."""
