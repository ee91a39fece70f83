"""Where rows live between processes. One protocol, one config, one adapter a store."""
