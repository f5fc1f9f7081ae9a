"""The clients of engines and of other servers."""
