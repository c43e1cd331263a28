"""strata-proxy: OpenAI-style HTTP in front of strata-engine."""
