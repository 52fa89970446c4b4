"""What the operating system gives and withholds: signals, limits, files."""
