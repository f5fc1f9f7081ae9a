"""The Batch API: requests of a file run through the same pipeline at the lowest priority."""
