"""Figures that step through a kernel: what a launch did in Triton's interpreter, recorded while the site is built."""
