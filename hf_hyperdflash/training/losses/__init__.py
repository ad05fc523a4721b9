"""What a drafter learns from, and its loss."""
