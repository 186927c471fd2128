"""Interfaces of other systems onto this one."""
