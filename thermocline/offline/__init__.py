"""Work that is done before text is generated: profiles, predictors, perplexity, traces, benchmarks."""
