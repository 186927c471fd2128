"""Instruments that inspect a backend, a machine or a run. An instrument imports what it needs when it is used."""
