"""Entry point of the group torch.backends."""


def load() -> None:
    """Return at once."""
