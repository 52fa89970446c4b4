"""Other libraries as contenders, one module each, with their public interfaces and their own defaults.

Each module imports its library at the top, so that its own import fails if the library is missing.
"""
