"""Plans of capacity: the command, the route and what the page shows, from one question."""
