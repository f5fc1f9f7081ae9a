"""The models served, each tenant's adapters, and the files that they come from."""
