"""HTTP over a scheduler: OpenAI's and Anthropic's interfaces, and a page to look at."""
