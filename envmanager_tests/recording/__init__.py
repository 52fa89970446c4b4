SUITE = "recording"
