"""Reassemblers as Ray actors, and the pool that feeds them."""
