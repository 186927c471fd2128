"""Instruments: what one looks at a backend, a machine or a run with. An instrument imports what it needs when it is used."""
