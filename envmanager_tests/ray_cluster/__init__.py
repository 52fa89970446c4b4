SUITE = "ray"
