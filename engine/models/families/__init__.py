"""A model family each: what its `config.json` says, as a `ModelSpec`."""
