"""Other libraries as contenders, one module each, by their public interfaces and with their own defaults.

The rule: a module here imports its library at the top, so that importing it tells whether the library is there.
"""
