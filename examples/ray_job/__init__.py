"""The example scripts as jobs of a Ray cluster; see docs/cluster.md."""
