"""The store of raw usage events and charges of moved days, beside the database's later ones."""
