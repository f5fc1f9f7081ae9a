"""The paged KV cache: block pool and prefix index."""
