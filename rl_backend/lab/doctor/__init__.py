"""What a machine and an installation can run. Nothing here imports torch, which may be what is broken."""
