"""GradiVeQ: Yu et al. 2018."""
