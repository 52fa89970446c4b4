SUITE = "openenv"
