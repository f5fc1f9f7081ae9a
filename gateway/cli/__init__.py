"""The `tollhouse` command line."""
