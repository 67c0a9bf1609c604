"""The gallery under several versions of Triton: what was tried, and figures of our ops."""
