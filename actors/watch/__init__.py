"""Instruments of a run: console, metrics, trace, health, times of phases."""
