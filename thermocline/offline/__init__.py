"""What is made or measured before text is generated: profiles, predictors, perplexity, traces, benchmarks."""
