"""Deliberate faults in the code, each with the tests that must notice it; ``make mutate`` applies them one by one."""
