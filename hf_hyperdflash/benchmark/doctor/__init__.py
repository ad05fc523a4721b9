"""What is wrong with a target and its drafter."""
