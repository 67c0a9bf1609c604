"""What is measured of each recipe beside other libraries: its `WORKS`, in a module of its name."""
