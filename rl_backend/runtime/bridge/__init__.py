"""The ``bridge`` runtime: Megatron-Core through Megatron-Bridge. Its options and checks do not import Megatron."""
