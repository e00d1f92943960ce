"""Opening: what a user named, as a model that a session takes. GGUFs run in place, or are packed first."""
