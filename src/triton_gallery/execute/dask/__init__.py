"""Executes recipes on the GPU workers of a Dask cluster."""
