"""vLLM's own tests of its server, against the gateway. Their source is the caller's."""
