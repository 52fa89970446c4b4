SUITE = "load"
