"""Account data over the Model Context Protocol."""
