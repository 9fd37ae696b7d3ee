"""FFT: Wang et al., HPDC 2020."""
