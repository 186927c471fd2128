"""A group of engines that sample as one, and its parts."""
