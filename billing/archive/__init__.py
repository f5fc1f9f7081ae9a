"""The store of raw usage events and charges of moved days."""
