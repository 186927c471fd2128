"""The cluster: placement on nodes and cores, addresses, rendezvous points and the door between nodes."""
