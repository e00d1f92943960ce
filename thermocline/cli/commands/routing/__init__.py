"""Commands about a mixture's routers: what they pick, what a cache of experts makes of that, its profile."""
