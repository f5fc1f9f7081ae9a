"""The `tollhouse` command, and the commands of the process itself."""
