"""Other libraries as contenders, one module each, with their public interfaces and their own defaults.

The rule: a module here imports its library at the top, so that importing it fails if the library is missing.
"""
