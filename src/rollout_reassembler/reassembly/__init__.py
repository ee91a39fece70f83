"""Floor 4: receipts and staged calls in, proven rows out."""
