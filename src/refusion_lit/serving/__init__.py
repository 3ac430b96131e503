"""The HTTP server: one engine, an OpenAI-compatible API, a page. Needs the extra ``serve``."""
