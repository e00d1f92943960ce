"""Other people's models into packs, and packs into theirs; synthetic models. Must not know engines."""
