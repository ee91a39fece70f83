"""What crosses process boundaries. Records, digests, messages, errors; numpy and pydantic alone."""
