"""Receipts and staged calls in, proven rows out."""
