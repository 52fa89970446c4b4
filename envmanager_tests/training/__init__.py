SUITE = "training"
