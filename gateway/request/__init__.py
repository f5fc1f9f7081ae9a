"""The vocabulary of a request: values, ports and endings. Imports nothing of the gateway."""
