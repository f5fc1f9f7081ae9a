"""The kernel that samples on a GPU."""
