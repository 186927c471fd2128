"""The cluster: placement on nodes and cores, addresses, meeting points and the door between nodes."""
