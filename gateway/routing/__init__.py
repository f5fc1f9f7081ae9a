"""Which replica gets a request, and what is known of each."""
