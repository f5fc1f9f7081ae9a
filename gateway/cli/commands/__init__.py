"""One module per command of `tollhouse`."""
