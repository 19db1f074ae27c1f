"""What serving a model needs besides attention: true positions, short queries against long caches."""
