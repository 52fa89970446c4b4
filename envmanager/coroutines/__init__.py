"""The kind ``asyncio``: environments that are coroutines, and others in threads, on an event loop in a thread."""
