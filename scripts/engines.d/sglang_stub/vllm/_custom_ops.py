"""See the package."""

rotary_embedding = None
