"""How candidates are timed next to each other, and the records of it."""
