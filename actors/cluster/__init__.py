"""The cluster: placement on nodes and cores, addresses, rendezvous, and the proxy between nodes."""
