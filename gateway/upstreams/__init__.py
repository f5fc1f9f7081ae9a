"""Upstreams: clients of the engines that generate, and the processes of local engines."""
