"""Floor 2: a staged call as a row of the data plane, both ways."""
