SUITE = "envpool"
