SUITE = "waiting"
