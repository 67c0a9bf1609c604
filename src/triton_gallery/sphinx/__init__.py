"""The Sphinx side: one extension for each thing that the site shows."""
