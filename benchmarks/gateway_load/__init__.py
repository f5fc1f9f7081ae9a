"""Parts of the gateway benchmark: the mock upstream, the load, our house, its peers."""
