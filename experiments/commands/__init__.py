"""The commands by subject: their arguments, and what they call. ``cli`` puts them together."""
