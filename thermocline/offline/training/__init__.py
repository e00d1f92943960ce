"""Predictors of active neurons: fitted to samples of a text, calibrated, and tried out end to end."""
