"""A staged call as a row of the data plane, both ways."""
