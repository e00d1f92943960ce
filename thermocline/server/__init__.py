"""`thermocline serve`: OpenAI's and llama.cpp's APIs over one engine, in two processes."""
