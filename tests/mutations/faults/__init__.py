"""The lists of faults, a module for each area; each has ``FAULTS``."""
