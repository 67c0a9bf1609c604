"""Executes recipes apart from each other on the GPUs of this machine, or its cores; records and sanitizes them."""
