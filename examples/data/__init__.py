"""What the examples learn from: one file a set, with its source and licence."""
