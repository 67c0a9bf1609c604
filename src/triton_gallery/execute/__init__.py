"""Executes recipes apart from each other on the GPUs of this machine, or its cores; records and sanitizes them."""

PRELOAD = "TRITON_GALLERY_PRELOAD"  # the variable that tells `preload` what to import, and in which environment
