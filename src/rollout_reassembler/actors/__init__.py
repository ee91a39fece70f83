"""Floor 5: reassemblers as Ray actors, and the pool that feeds them."""
