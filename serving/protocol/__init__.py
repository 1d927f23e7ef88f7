"""Dialects: each turns bodies of HTTP requests into `Work`, and what the engine says into answers. One module each."""
