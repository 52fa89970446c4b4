"""Worker processes: how they start, talk and end. Nothing here is public."""
