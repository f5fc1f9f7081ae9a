"""The checks of `tollhouse doctor`."""
