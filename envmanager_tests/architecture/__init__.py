SUITE = "check"
