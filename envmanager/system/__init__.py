"""Services of the operating system: signals, processes and files."""
