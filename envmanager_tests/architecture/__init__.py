SUITE = "core"
