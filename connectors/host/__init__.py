"""This host: its processes, servers, own folders and memory. All connectors may use it."""
