SUITE = "core portable"
