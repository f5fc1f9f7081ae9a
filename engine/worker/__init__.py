"""The engine as a process: server, wire format, client and heartbeats."""
