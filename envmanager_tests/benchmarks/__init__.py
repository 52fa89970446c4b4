SUITE = "bench"
