"""Small models and their training, for comparisons of recipes."""

__all__: list[str] = []
