"""Checks a machine and an installation. Nothing here imports torch, which may be the broken part."""
