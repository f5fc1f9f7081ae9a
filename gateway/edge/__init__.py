"""HTTP and who asks: connections, bodies, addresses, threads and authentication."""
