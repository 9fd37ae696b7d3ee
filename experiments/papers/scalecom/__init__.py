"""ScaleCom: Chen et al. 2020."""
