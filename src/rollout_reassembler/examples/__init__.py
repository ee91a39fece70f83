"""Floor 6: runs one can start and read, each a user of the floors below and imported by none of them."""
