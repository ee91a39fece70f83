"""Floor 0: what crosses process boundaries. Records, digests, messages, errors; numpy and pydantic alone."""
