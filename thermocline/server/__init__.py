"""`thermocline serve`: OpenAI's API and llama.cpp's over one engine, in two processes."""
