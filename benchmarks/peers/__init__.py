"""Other engines on the same work, each a script that runs in an environment of its own."""
