"""What is measured of each recipe beside other libraries, in a module of its name."""
