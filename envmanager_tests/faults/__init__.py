SUITE = "core portable start-methods faults"
