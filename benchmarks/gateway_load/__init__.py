"""Parts of the gateway benchmark: the mock upstream, the load, our gateway, its peers."""
